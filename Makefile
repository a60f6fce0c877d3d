PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# One of the CPU's bf16 paths can kill the process (oneDNN with AMX), and one thread keeps sums repeatable.
TEST_ENV := ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 OMP_NUM_THREADS=1

# What pytest makes of the tests' code is kept for the next run, whatever the shell says: it takes seconds.
unexport PYTHONDONTWRITEBYTECODE

# What needs neither a compiler nor a browser nor a GPU nor patience.
QUICK := not slow and not inductor and not browser and not gpu
LOAD ?= 4
MINUTES ?= 10

.PHONY: demo test quick steady fuzz coverage check docs format clean

demo: $(STAMP)
	$(BIN)/lowtide demo

test: check
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal -q

coverage: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal -q --cov --cov-report=term:skip-covered --cov-report=html
	@echo "line by line in htmlcov/index.html"

quick: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal -q -m "$(QUICK)"

# Ten runs in a row must be green while $(LOAD) other processes keep the machine busy.
steady: $(STAMP)
	$(TEST_ENV) sh tests/ten_times.sh $(LOAD) $(BIN)/python -m pytest -n 2 --dist worksteal -q -m "$(QUICK)"

# Random modules, graphs and files, and the compiled search under its sanitizers. The seed is printed; SEED=... takes one.
fuzz: $(STAMP)
	$(TEST_ENV) PYTHONPATH=tests $(BIN)/python -m fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
	rm -rf site
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs/site . site
	@echo "the site is in site/index.html"

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist demo-output site htmlcov .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@echo "installing into .venv: some minutes the first time, with torch to fetch"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@
