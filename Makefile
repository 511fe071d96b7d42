# Every habit of the house. `make demo` and `make test` need a clone and Python >= 3.11, nothing else.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
AIRFLOW_VENV := .venv-airflow
# or Airflow's own list for another Python; its address is in the file
AIRFLOW_CONSTRAINTS ?= recipes/airflow-constraints.txt

.PHONY: setup setup-airflow demo test test-airflow lint format bench samples clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

# apart from .venv: Airflow pins much, and calls prefill as a command only
setup-airflow: $(AIRFLOW_VENV)/.ready

$(AIRFLOW_VENV)/.ready: recipes/airflow-constraints.txt
	$(PYTHON) -m venv $(AIRFLOW_VENV)
	$(AIRFLOW_VENV)/bin/pip install --quiet --disable-pip-version-check apache-airflow \
		--constraint "$(AIRFLOW_CONSTRAINTS)"
	touch $@

demo: setup
	$(BIN)/python -m recipes.demo

test: setup
	$(BIN)/python -m pytest

test-airflow: setup setup-airflow
	AIRFLOW=$(abspath $(AIRFLOW_VENV))/bin/airflow $(BIN)/python -m pytest tests/airflow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m prefillcli.bench
	$(BIN)/prefill bench --workload post-recommendation --workload needle --rows 100 --keep 0.2 --keep 0.1 \
		--query-window 8 --select-chunk 16 --pool 1 -o out/bench.json

samples: setup
	$(BIN)/python -m recipes.make_samples

clean:
	rm -rf $(VENV) $(AIRFLOW_VENV) out build dist
