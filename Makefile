# Two commands from a fresh clone: `make predict` and `make test`. Both make .venv first; only the second installs torch.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install -qq --constraint constraints.txt

.PHONY: predict test lint accuracy cpu traces curves readme clean

predict: .venv/predict.stamp
	$(BIN)/perfmodel predict scenarios/gpt2.7b.yaml --plot out/gpt2.7b --trace out/gpt2.7b/trace.json.gz

test: .venv/test.stamp
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: .venv/test.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Every committed measurement against today's predictions; no GPU needed.
accuracy: .venv/test.stamp
	$(BIN)/perfmodel compare results --plot results/plots --output ACCURACY.md

# The four commands on this machine's CPU, on one rank and on two.
cpu: .venv/test.stamp
	rm -rf out/cpu
	$(BIN)/perfmodel calibrate --device cpu --scenario scenarios/tiny-cpu.yaml --scenario scenarios/tiny-ddp-cpu.yaml --output out/cpu/cpu.json
	$(BIN)/perfmodel calibrate --device cpu --interconnect gloo --ranks 2 --scenario scenarios/tiny-ddp-cpu.yaml --output out/cpu/cpu.json
	for scenario in tiny-cpu tiny-ddp-cpu; do \
		$(BIN)/perfmodel predict scenarios/$$scenario.yaml --set hardware.profile=out/cpu/cpu.json && \
		$(BIN)/perfmodel validate scenarios/$$scenario.yaml --set hardware.profile=out/cpu/cpu.json --device cpu --output out/cpu/results || exit 1; \
	done
	$(BIN)/perfmodel compare out/cpu/results --plot out/cpu/plots --output out/cpu/ACCURACY.md

# The traces that are shipped with the scenarios, so that predicting those needs no torch.
traces: .venv/test.stamp
	PYTHONPATH=. $(BIN)/python .ci/traces.py

# Curves, power and couplings of the shipped profiles, from the records in them; some minutes.
curves: .venv/test.stamp
	PYTHONPATH=. $(BIN)/python .ci/curves.py

# Bring the outputs and figures that README.md shows up to date.
readme: .venv/test.stamp
	$(BIN)/python .ci/readme.py --write

clean:
	rm -rf out .venv

.venv/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "perfmodel needs Python 3.11 or newer (got $$($(PYTHON) --version)). Run make PYTHON=python3.12." >&2; exit 1; }
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/predict.stamp: .venv/python.stamp pyproject.toml constraints.txt
	@echo "installing perfmodel into .venv"
	@$(INSTALL) --editable .
	@touch $@

.venv/test.stamp: .venv/python.stamp pyproject.toml constraints.txt
	@echo "installing perfmodel, torch and the tools of development into .venv"
	@$(INSTALL) --editable '.[torch,dev]'
	@touch $@ .venv/predict.stamp
