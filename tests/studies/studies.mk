# Measurements against baselines, and studies that answered a question (tests/studies/README.md)
# No other target runs them.

bench: ## ucm-bench's benchmarks on a private daemon; figures to standard output
	@$(if $(filter no,$(SETUP)),,tests/setup/packages.sh $(PKG_BUILD))
	+@$(SUBMAKE) all
	tests/studies/bench.sh $O

# A directory that measures the NVMe tier on a host without Debian's packages: programs, the libraries that they need beyond the C
# library, and run.sh.
bench-bundle: $(BINS) ## build/bench-bundle: ucm-bench tier for another host, by its run.sh
	@mkdir -p $O/bench-bundle/lib
	cp tests/studies/bundle.sh $O/bench-bundle/run.sh
	cp $(BINS) $O/bench-bundle
	tests/studies/bundle_libs.sh $O/bench-bundle/lib $(BINS)

.PHONY: bench bench-bundle
