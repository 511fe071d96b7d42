"""Scoring from Python: `prefillcli.score` and `prefillcli.Scorer`."""
