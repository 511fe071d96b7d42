"""Follow-ups: questions about scored rows."""
