"""Imported first by the server that workers are forked from: it drops messages of libraries during their import."""

from prefillcli.runtime.extras import quiet_imports

quiet_imports()
