.PHONY: check test docs bench gpu

check:
	ruff check .
	ruff format --check .

test:
	pytest

docs:
	mkdocs build --strict

bench:
	python -m tests.benchmarks.decode_vs_transformers

# on a machine with a CUDA device; make gpu PEERS=folder times the peer kernels of that folder as well
gpu:
	python -m tests.gpu_suite $(if $(PEERS),--peers $(PEERS))
