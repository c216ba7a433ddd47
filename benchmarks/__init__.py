"""Speed and memory of engram as ratios, one command each."""
