"""What stands between the trainer of a rank and the outer sync that it takes part in."""
