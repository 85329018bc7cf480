"""What a run trains on, as its loop sees it: tokens or images."""
