"""Imported first by the server that workers are forked from: what libraries say while it imports them is of no use."""

from prefillcli.runtime.extras import quiet_imports

quiet_imports()
