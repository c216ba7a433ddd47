"""The study of nets as people train them: verdicts beside the truth from trainings on subsets."""
