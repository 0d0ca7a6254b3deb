"""What is measured of one model, in which order, and what that says: shared by `paceline bench` and the dashboard."""
