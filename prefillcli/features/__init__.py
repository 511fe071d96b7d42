"""The features: each is one folder or file with its options, work, columns and report, and can be deleted."""
