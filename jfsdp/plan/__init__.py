"""What a job will do on a cluster that nobody has rented yet."""
