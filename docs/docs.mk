# Documents: the pages that are generated, and pictures of a run

docs: $(addprefix $O/,$(PAGED)) ## the generated pages of docs/, and the words of each page
	@$(if $(HAVE_ZMQ),,echo 'ucmevents is not built here, so docs/commands.md stays as it is.' >&2)
	@python3 -B tests/docs/make.py $O

# Drawn on a quiet machine when a panel or a line changes; no test draws.
pictures: setup-check ## docs/board.svg and docs/top.svg: the board, and ucmctl top, over 75 seconds of work
	+@$(SUBMAKE) all
	UCMD=$(abspath $O)/ucmd UCMCTL=$(abspath $O)/ucmctl UCM_BENCH=$(abspath $O)/ucm-bench /usr/bin/python3 -B tests/docs/board.py

.PHONY: docs pictures
