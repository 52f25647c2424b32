"""Lists of items per user, built of events."""
