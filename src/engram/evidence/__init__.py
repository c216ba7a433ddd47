"""More certainty than a result has by itself: assessed, refined, held against the truth."""
