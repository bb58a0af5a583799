# Documents: the pages that are generated

docs: $(addprefix $O/,$(PAGED)) ## the generated pages of docs/, and the words of each page
	@$(if $(HAVE_ZMQ),,echo 'ucmevents is not built here, so docs/commands.md stays as it is.' >&2)
	@python3 -B tests/docs/make.py $O

.PHONY: docs
