"""Model hubs: searching them, and downloads that resume and publish a whole folder at once."""
