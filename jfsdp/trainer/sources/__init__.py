"""What a run trains on, as its loop sees it: tokens, pairs of answers, or custom data."""
