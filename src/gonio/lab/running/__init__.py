"""Running a study: its database, its jobs and the training of one model."""
