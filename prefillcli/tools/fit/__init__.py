"""`prefill fit`: rows with right answers become heads."""
