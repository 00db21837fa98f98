.PHONY: check check-deep test docs bench gpu

check:
	ruff check .
	ruff format --check .

test:
	pytest

# tests of planning with random inputs: 2000 inputs for each test, 40,000 in all; takes half an hour
check-deep:
	HYPOTHESIS_PROFILE=deep pytest tests/planning/test_batch.py tests/planning/test_schedule.py tests/mla/test_choose_path.py tests/mla/test_builder.py \
	  tests/mla/test_cascade.py

docs:
	mkdocs build --strict

bench:
	python -m tests.benchmarks.decode_vs_transformers
	python -m tests.benchmarks.gqa_vs_transformers

# needs a CUDA device; `make gpu PEERS=folder` also times the kernels of other projects that the folder wraps
gpu:
	python -m tests.gpu_suite $(if $(PEERS),--peers $(PEERS))
