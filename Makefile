.PHONY: check check-deep test docs bench gpu

check:
	ruff check .
	ruff format --check .

test:
	pytest

# what runs at night: every property test of the planners with 2000 examples, 40,000 in all
check-deep:
	HYPOTHESIS_PROFILE=deep pytest tests/planning/test_batch.py tests/planning/test_schedule.py tests/mla/test_choose_path.py tests/mla/test_builder.py \
	  tests/mla/test_cascade.py

docs:
	mkdocs build --strict

bench:
	python -m tests.benchmarks.decode_vs_transformers

# on a machine with a CUDA device; make gpu PEERS=folder times the peer kernels of that folder as well
gpu:
	python -m tests.gpu_suite $(if $(PEERS),--peers $(PEERS))
