# Two commands do all the set-up: `make reproduce` and `make test`. Both work in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Processes of `make test`; a worker takes about 0.7 GB.
WORKERS ?= auto
# One thread per process: on few cores two threads in one process are slower than one (see docs/howto/compare.md).
export OMP_NUM_THREADS ?= 1
# Each process that a test starts would compile all modules anew, half a second, where this variable is set.
export PYTHONDONTWRITEBYTECODE =

.PHONY: reproduce test browser test-slow distributed test-cuda arithmetic interface matrix bank planted soak versions wheel sweep lint bench docs site clean

reproduce: $(VENV)/.lab
	$(BIN)/gonio reproduce

test: $(VENV)/.dev
	$(MAKE) --no-print-directory lint
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal

# What tests/browser needs besides Chromium; without it `make test` skips them.
browser: $(VENV)/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --group browser

test-slow: $(VENV)/.dev
	$(BIN)/pytest -q -m slow -n $(WORKERS) --dist worksteal

# The tests of several processes, with two and with four of them, ROUNDS times each; about a minute a round.
ROUNDS ?= 20
distributed: $(VENV)/.dev
	for world in 2 4; do for round in $$(seq $(ROUNDS)); do \
	GONIO_WORLD=$$world $(BIN)/pytest -q -m processes tests || exit 1; done; done

# The laws with real tensors on a CUDA device; one message where there is none.
test-cuda: $(VENV)/.dev
	@if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; \
	then $(BIN)/pytest -q -m cuda tests/laws; \
	else echo "there is no CUDA device: the laws on real accelerators were not run"; fi

# The tests and the claims under the arithmetic of other processors: kernels without vectors, with AVX2, and more threads
# (more than there may be cores: they must sleep while they wait, or the suite takes an hour).
VECTORS := "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE" \
	"ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=COMPATIBLE"
ARITHMETIC ?= tests
arithmetic: $(VENV)/.dev
	@failed=; folder=$$(mktemp -d); \
	for setting in $(VECTORS) "OMP_NUM_THREADS=1" "OMP_NUM_THREADS=2" \
		"OMP_NUM_THREADS=4 OMP_WAIT_POLICY=PASSIVE"; do \
		echo "== $$setting"; \
		env $$setting $(BIN)/pytest -q -n $(WORKERS) --dist worksteal $(ARITHMETIC) || failed="$$failed [tests: $$setting]"; \
		env $$setting $(BIN)/gonio reproduce -o "$$folder/$$setting" || failed="$$failed [claims: $$setting]"; \
	done; \
	rm -rf "$$folder"; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

# Write tests/interface.txt anew: every public name with its signature.
interface: $(VENV)/.dev
	$(BIN)/python tests/interface.py

# Every method in every setting of training: run the tests, write the page from their results.
matrix: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/pytest -q -p laws.matrix -m matrix --matrix docs/matrix.json -n $(WORKERS) --dist loadfile tests/laws
	PYTHONPATH=tests $(BIN)/python -m laws.matrix docs/matrix.json docs/matrix.md

# Other people's models and files through every verb: the data of docs/reads-and-edits.md, and the page.
bank: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m bank.live.cases docs/bank-live.json
	PYTHONPATH=tests $(BIN)/python -m bank.files docs/bank-files.json
	$(BIN)/python docs/build_bank.py

# Planted damages in files of every format, and healthy files: the table of docs/howto/check.md and its translation.
planted: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m checking.counts
	$(BIN)/python docs/build_translations.py

# The tests of tests/slow for longer: half an hour of threads, 1,000 damages of study files, 2,000 kills of studies and
# of commands, 5,000 files that were tampered with, 5,000 runs on a cluster with a node killed every minute; and 60
# interruptions of every verb and its undo.
soak: $(VENV)/.dev
	GONIO_THREADS_SECONDS=1800 GONIO_DAMAGES=1000 GONIO_KILLS=2000 GONIO_CLUSTER_RUNS=5000 GONIO_NODE_SECONDS=60 \
		GONIO_HOSTILE=5000 $(BIN)/pytest -q -m slow tests/slow
	GONIO_POINTS=60 $(BIN)/pytest -q -m "slow or not slow" tests/laws/test_interruption.py

# The tests of the library and of its commands with the oldest and the newest packages; downloads about 7 GB each.
versions:
	$(PYTHON) tests/versions.py

# The distributions, checked and installed into empty environments; about five minutes. dist/ keeps them.
wheel: $(VENV)/.release
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -c "from rattler_build import RenderConfig, Stage0Recipe, VariantConfig; \
	print('conda:', *Stage0Recipe.from_file('packaging/conda/recipe.yaml').render(VariantConfig(), RenderConfig()))"
	$(PYTHON) tests/wheel.py dist/*

# Models of timm through all of the library; about an hour on one core. Goes on where it stopped.
SWEEP ?= 332
sweep: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m sweeps.timm_sweep --count $(SWEEP) --out timm-sweep.jsonl > tests/sweeps/timm_outcome.txt

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.study
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.history

# Run the pages and write the outputs and tables that they show anew; docs/zh repeats those of the English pages.
docs: $(VENV)/.dev
	cd tests && ../$(BIN)/python -m docs.pages ../README.md ../docs/*.md ../docs/howto/*.md ../docs/methods/*.md ../docs/gallery/*.md \
		../docs/zh/commands.md
	$(BIN)/python docs/build_claims.py
	$(BIN)/python docs/build_methods.py
	$(BIN)/python docs/build_sources.py
	$(BIN)/python docs/build_schemas.py
	$(BIN)/python -m benchmarks.other_tools --table
	$(BIN)/python docs/build_translations.py

# The pages, notebooks and docstrings as a site; needs no network. NOTEBOOKS=off leaves the pictures of notebooks out.
NOTEBOOKS ?= cache
site: $(VENV)/.docs
	$(BIN)/sphinx-build -W --keep-going -q -b html -D nb_execution_mode=$(NOTEBOOKS) -d site/.doctrees docs site

# pip knows dependency groups since 25.1.
INSTALL = $(PYTHON) -m venv $(VENV) && $(BIN)/pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1" \
	&& $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

$(VENV)/.lab: pyproject.toml constraints.txt
	$(INSTALL) -e ".[lab]"
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	$(INSTALL) -e . --group dev
	touch $@ $(VENV)/.lab

$(VENV)/.bench: pyproject.toml constraints.txt
	$(INSTALL) -e . --group bench
	touch $@ $(VENV)/.dev $(VENV)/.lab

$(VENV)/.docs: pyproject.toml constraints.txt
	$(INSTALL) -e . --group docs
	touch $@ $(VENV)/.dev $(VENV)/.lab

$(VENV)/.release: pyproject.toml constraints.txt
	$(INSTALL) -e . --group release
	touch $@

clean:
	rm -rf $(VENV) dist site jupyter_execute docs/reference gonio-study gonio-claims .mypy_cache .pytest_cache .ruff_cache
