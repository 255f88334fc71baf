# `make` lists the commands. They set up what they need, once, in .venv.
#
# PYTHON=python3.12   the Python (3.11 to 3.13) that .venv is made with
# ENV=current         no set-up: use PYTHON as it is (a conda environment, a machine without registry)
# MODEL= PAGE_SIZE=   for `make run` and `make lab`: another model, tokens a page,
# PAYLOAD= LAYOUTS=   bytes that move, layouts; notebooks read them in their first cell,
# PAGES= BUDGET=      pages that move instead of a payload; seconds to measure a GPU
# NB=path             for `make notebooks`, `make run` and `make lab-check`: this notebook only
# ARGS=               for `make run`, `make bench`, `make bench-gpu` and `make lab`: passed on
# A=file B=file       for `make compare`: results of two devices, or of two commits
# DEVICE=h200         for what runs on GPUs: its folder in data/results, if not named after the GPU (two: h200-x2)

PYTHON ?= python3
ENV ?=
DEVICE ?= $(shell $(PY) -c "import torch; print(torch.cuda.get_device_name().split()[-1].lower())")
GPUS = $(shell $(PY) -c "import torch; print(torch.cuda.device_count())")
TOOLS := memcheck initcheck synccheck

ifeq ($(ENV),current)
PY := $(PYTHON)
READY := python-at-hand
NEEDS = @$(PY) verify/environment.py
else ifeq ($(ENV),)
PY := .venv/bin/python
READY := .venv/ready
NEEDS = @: # pip has seen to it:
else
$(error ENV=$(ENV) is unknown: leave it out, or say ENV=current)
endif

# The checkout works without being installed, in kernels of notebooks too.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help run verify verify-full verify-gpu verify-gpus sanitize report bench bench-gpu bench-gpus calibrate compare notebooks lab lab-check lint clean python-at-hand gpu-at-hand

help: ## list the commands (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(READY) ## execute every notebook, print the matrix; results in out/index.html
	$(NEEDS) notebooks
	$(PY) -m verify run $(if $(MODEL),--model '$(MODEL)') $(if $(PAGE_SIZE),--page-size '$(PAGE_SIZE)') \
	  $(if $(PAGES),--pages '$(PAGES)') $(if $(PAYLOAD),--payload '$(PAYLOAD)') \
	  $(if $(LAYOUTS),--layouts '$(LAYOUTS)') $(if $(BUDGET),--budget '$(BUDGET)') \
	  $(if $(NB),--notebooks $(NB)) $(ARGS)

verify: $(READY) ## everything that must hold: lint, types, notebooks, tests, mutants
	$(NEEDS) notebooks dev nvrtc
	$(LINT)
	$(PY) -m verify.notebooks check
	$(PY) -m verify.notebooks nbval
	$(PY) -m verify.lab $(if $(CI),,--if-browser)
	$(PY) -m pytest --timeout 600 -n auto --maxprocesses 8 --dist worksteal $(FULL)
	$(PY) -m verify mutants

verify-full: ## the same with every combination and every slow test
	@$(MAKE) --no-print-directory verify FULL=--full

# On an NVIDIA GPU. Torch's allocator would hide from a sanitizer where one buffer ends and the next begins.
SANITIZED := $(TOOLS:%=out/%.log)
.PHONY: $(SANITIZED)
sanitize: $(SANITIZED) ## a small matrix with real kernels under compute-sanitizer; logs in out/

$(SANITIZED): out/%.log: gpu-at-hand
	mkdir -p out
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $* $(PY) -m verify.sanitize \
	  $(if $(filter initcheck,$*),--plain-copies) > $@ 2>&1 || { tail -n 50 $@; exit 1; }
	tail -n 1 $@

verify-gpu: gpu-at-hand ## the suite on an NVIDIA GPU, recorded in data/results/$(DEVICE)/verify.json; then the notebooks, live
	$(NEEDS) notebooks
	$(MAKE) --no-print-directory --jobs=$(words $(TOOLS)) sanitize
	$(PY) -m verify.gpu_record --out data/results/$(DEVICE)/verify.json --sanitizer $(SANITIZED) $(ARGS)
	$(PY) -m pytest verify/tests/test_live_book.py --full --timeout 900

bench-gpu: gpu-at-hand ## measure the GPU backends: make bench-gpu ARGS="--portion core,sglang --resume"
	$(PY) -m verify.bench.gpu --out data/results/$(DEVICE)/bench.json $(ARGS)

verify-gpus: gpu-at-hand ## what needs several GPUs of one host; recorded in data/results/$(DEVICE)-x$(GPUS)/devices.json
	$(PY) -m verify.devices_record --out data/results/$(DEVICE)-x$(GPUS)/devices.json $(ARGS)

bench-gpus: gpu-at-hand ## a rank on each GPU of this host, alone and at once; data/results/$(DEVICE)-x$(GPUS)/ranks.json
	$(PY) -m verify.bench.gpu.ranks --out data/results/$(DEVICE)-x$(GPUS)/ranks.json $(ARGS)

calibrate: gpu-at-hand ## measure this GPU for backend auto
	$(PY) -m kernels_cupy.calibrate

report: $(READY) ## write the support matrix as a page
	$(NEEDS) notebooks dev
	$(PY) -m verify report

bench: $(READY) ## measure the backends: make bench ARGS="--backends torch,numba"
	$(NEEDS) notebooks
	$(PY) -m verify.bench $(ARGS)

compare: $(READY) ## two result files side by side: make compare A=data/results/h200/bench.json B=out/bench.json
	$(NEEDS) dev
	@$(if $(and $(A),$(B)),,$(error say make compare A=one.json B=other.json))$(PY) -m verify compare '$(A)' '$(B)'

notebooks: $(READY) ## run the notebooks in place, strip them, write their text pairs
	$(NEEDS) notebooks
	$(PY) -m verify.notebooks refresh $(NB)

# Jupyter prints the address to open, token included. As root it would refuse without --allow-root.
lab: $(READY) ## open the notebooks in JupyterLab
	$(NEEDS) notebooks
	$(PY) -m jupyterlab --allow-root --ServerApp.root_dir=. --ServerApp.preferred_dir=notebooks $(ARGS)

lab-check: $(READY) ## the notebooks in JupyterLab in a headless browser; pictures in out/lab/
	$(NEEDS) notebooks browser
	$(PY) -m verify.lab $(NB)

lint: $(READY) ## style and types only
	$(NEEDS) dev
	$(LINT)

clean: ## remove results and caches (.venv stays)
	rm -rf out build *.egg-info .pytest_cache .ruff_cache .hypothesis notebooks/.ipynb_checkpoints
	find refimpl kernels_cupy verify notebooks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

define LINT
$(PY) -m ruff check
$(PY) -m ruff format --check
$(PY) -m pyright --pythonpath $$($(PY) -c 'import sys; print(sys.executable)')
endef

define CHECK_PYTHON
@command -v $(PYTHON) >/dev/null || { echo '$(PYTHON) is not there: install Python 3.11 to 3.13, or say PYTHON=' >&2; exit 1; }
@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
  (3, 11) <= v <= (3, 13) or sys.exit("$(PYTHON) is Python %d.%d: 3.11 to 3.13 will do, say PYTHON=" % v)'
endef

gpu-at-hand: $(READY)
	@$(PY) -c 'import torch; torch.cuda.is_available() or exit("here is no NVIDIA GPU that torch can use")'

python-at-hand:
	$(CHECK_PYTHON)

# With an NVIDIA GPU also CuPy, one of two: the driver says which CUDA it can run.
.venv/ready: pyproject.toml constraints.txt | .venv/bin/python
	@extras=notebooks,dev,browser; \
	if smi=$$(nvidia-smi 2>/dev/null); then \
	  case "$$smi" in *CUDA*"Version: 12."*) extras=$$extras,gpu12,nvrtc12 ;; *) extras=$$extras,gpu,nvrtc ;; esac; \
	else extras=$$extras,nvrtc; fi; \
	echo "installing [$$extras] into .venv, minutes the first time"; \
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$$extras]"
	@touch $@

.venv/bin/python:
	$(CHECK_PYTHON)
	@$(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo '$(PYTHON) cannot make .venv (Debian: install python3-venv), or say ENV=current' >&2; exit 1; }
