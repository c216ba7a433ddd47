"""Some examples of a result again, by dearer and better means."""
