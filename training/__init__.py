"""What makes and trains the sample data and the sample models in `samples/`. Not in the wheel."""

from prefillcli.runtime.extras import quiet_imports

quiet_imports()  # as in the command: what other libraries log while they are imported helps nobody here
