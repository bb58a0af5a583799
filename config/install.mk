# Installing what `make` built, and packages of it

PREFIX         ?= /usr/local
SYSCONFDIR     ?= /etc
BINDIR         ?= $(PREFIX)/bin
LIBDIR         ?= $(PREFIX)/lib
LIBEXECDIR     ?= $(PREFIX)/libexec/ucmd
INCLUDEDIR     ?= $(PREFIX)/include
SYSTEMDUNITDIR ?= $(PREFIX)/lib/systemd/system
GENERATORDIR   ?= $(PREFIX)/lib/systemd/system-generators
SYSUSERSDIR    ?= $(PREFIX)/lib/sysusers.d
TMPFILESDIR    ?= $(PREFIX)/lib/tmpfiles.d
MANDIR         ?= $(PREFIX)/share/man
BASHCOMPDIR    ?= $(PREFIX)/share/bash-completion/completions
ZSHCOMPDIR     ?= $(PREFIX)/share/zsh/site-functions
FISHCOMPDIR    ?= $(PREFIX)/share/fish/vendor_completions.d
# For Prometheus and Grafana.
OBSERVE        := prometheus.yml alerts.yml ucmd-board.json
MAN_PAGES      := man1/ucmctl.1 man1/ucm-bench.1 man8/ucmd.8 man5/ucmd.yaml.5 $(if $(HAVE_ZMQ),man1/ucmevents.1)
D = $(DESTDIR)
INSTALLED_FROM := proto kernels client daemon

install: check-built ## what `make` built, into PREFIX (/usr/local), below DESTDIR; an existing configuration is kept
	install -d $(D)$(BINDIR) $(D)$(LIBDIR)/pkgconfig $(D)$(INCLUDEDIR) $(D)$(SYSCONFDIR)/ucmd \
	    $(D)$(SYSTEMDUNITDIR) $(D)$(GENERATORDIR) $(D)$(SYSUSERSDIR) $(D)$(TMPFILESDIR)
	install -m 755 $(BINS) $(D)$(BINDIR)
	install -d $(D)$(LIBEXECDIR)
	install -m 755 $(BACKENDS) $(SCRIPTS) $(D)$(LIBEXECDIR)
	for lib in libucmclient $(patsubst $O/%.a,%,$(wildcard $O/libucmclient_cuda.a)); do \
	    install -m 755 $O/$$lib.so.$(VERSION) $(D)$(LIBDIR) && \
	    ln -sf $$lib.so.$(VERSION) $(D)$(LIBDIR)/$$lib.so.$(SO_VERSION) && \
	    ln -sf $$lib.so.$(SO_VERSION) $(D)$(LIBDIR)/$$lib.so && \
	    install -m 644 $O/$$lib.a $(D)$(LIBDIR) && \
	    install -m 644 client/include/$${lib#lib}.h $(D)$(INCLUDEDIR) && \
	    sed -e 's|@VERSION@|$(VERSION)|' -e 's|@LIBDIR@|$(LIBDIR)|' -e 's|@INCLUDEDIR@|$(INCLUDEDIR)|' \
	        client/$$lib.pc.in > $(D)$(LIBDIR)/pkgconfig/$$lib.pc || exit 1; done
	install -m 644 client/include/ucmclient_sparse.h client/include/ucmclient_mapping.h $(D)$(INCLUDEDIR)
	$(if $(HAVE_CUDA),install -m 644 client/include/ucmclient_cuda_sparse.h client/include/ucmclient_cuda_decode.h $(D)$(INCLUDEDIR))
	for page in $(MAN_PAGES); do \
	    install -D -m 644 $O/pages/$${page#*/} $(D)$(MANDIR)/$$page || exit 1; done
	for program in $(PAGED); do \
	    install -D -m 644 $O/pages/$$program.bash $(D)$(BASHCOMPDIR)/$$program && \
	    install -D -m 644 $O/pages/_$$program $(D)$(ZSHCOMPDIR)/_$$program && \
	    install -D -m 644 $O/pages/$$program.fish $(D)$(FISHCOMPDIR)/$$program.fish || exit 1; done
	if [ -e $(D)$(SYSCONFDIR)/ucmd/ucmd.yaml ]; then new=.new; fi; \
	    install -m 644 config/ucmd.yaml $(D)$(SYSCONFDIR)/ucmd/ucmd.yaml$$new
	install -d $(D)$(PREFIX)/share/ucmd
	install -m 644 $(addprefix config/observe/,$(OBSERVE)) $(D)$(PREFIX)/share/ucmd
	for unit in ucmd.service ucmd.socket $(if $(HAVE_ZMQ),ucmevents@.service); do \
	    sed -e 's|/usr/bin/ucm|$(BINDIR)/ucm|' -e 's|/etc/ucmd/|$(SYSCONFDIR)/ucmd/|' \
	        systemd/$$unit > $(D)$(SYSTEMDUNITDIR)/$$unit || exit 1; done
	sed -e 's|/usr/bin/ucmd|$(BINDIR)/ucmd|' -e 's|/etc/ucmd/|$(SYSCONFDIR)/ucmd/|' \
	    systemd/ucmd-generator > $(D)$(GENERATORDIR)/ucmd-generator
	chmod 755 $(D)$(GENERATORDIR)/ucmd-generator
	install -m 644 systemd/ucmd.sysusers $(D)$(SYSUSERSDIR)/ucmd.conf
	install -m 644 systemd/ucmd.tmpfiles $(D)$(TMPFILESDIR)/ucmd.conf
	if [ -z '$(D)' ] && [ "$$(id -u)" = 0 ]; then ldconfig; fi

# Installing compiles nothing, as it mostly runs as root.
check-built:
	@[ -e $(BUILT) ] || { echo "Nothing is built in $O: run 'make' as yourself, then 'sudo make install'." >&2; exit 1; }
	@changed=$$(find $(INSTALLED_FROM) -newer $(BUILT) \( -name '*.[chS]' -o -name 'ucmctl-*' -o -name 'ucm-bench-*' -o -name pages.py -o -name 'main.py' \) -print -quit); [ -z "$$changed" ] || { \
	    echo "$$changed is newer than what is built in $O: run 'make' as yourself first." >&2; exit 1; }

uninstall: ## what install put there, but for the configuration
	rm -f $(addprefix $(D)$(BINDIR)/,$(notdir $(BINS))) \
	    $(addprefix $(D)$(LIBEXECDIR)/,$(notdir $(BACKENDS) $(SCRIPTS))) \
	    $(addprefix $(D)$(LIBDIR)/,$(SO) $(SO).$(SO_VERSION) $(SO).$(VERSION) libucmclient.a) \
	    $(D)$(LIBDIR)/pkgconfig/libucmclient.pc $(addprefix $(D)$(INCLUDEDIR)/,ucmclient.h ucmclient_sparse.h ucmclient_mapping.h) \
	    $(addprefix $(D)$(LIBDIR)/libucmclient_cuda.,so so.$(SO_VERSION) so.$(VERSION) a) \
	    $(D)$(LIBDIR)/pkgconfig/libucmclient_cuda.pc $(addprefix $(D)$(INCLUDEDIR)/,ucmclient_cuda.h ucmclient_cuda_sparse.h ucmclient_cuda_decode.h) \
	    $(D)$(SYSTEMDUNITDIR)/ucmd.service $(D)$(SYSTEMDUNITDIR)/ucmd.socket $(D)$(SYSTEMDUNITDIR)/ucmevents@.service $(D)$(GENERATORDIR)/ucmd-generator \
	    $(D)$(SYSUSERSDIR)/ucmd.conf $(D)$(TMPFILESDIR)/ucmd.conf $(addprefix $(D)$(MANDIR)/,$(MAN_PAGES)) \
	    $(addprefix $(D)$(PREFIX)/share/ucmd/,$(OBSERVE)) \
	    $(foreach p,$(PAGED),$(D)$(BASHCOMPDIR)/$p $(D)$(ZSHCOMPDIR)/_$p $(D)$(FISHCOMPDIR)/$p.fish)
	if [ -z '$(D)' ] && [ "$$(id -u)" = 0 ]; then ldconfig; fi

PKG_DEB := $(PKG_BUILD) chrpath debhelper dh-python dpkg-dev python3

deb: ## Debian packages of this tree, into build/deb
	@$(if $(filter no,$(SETUP)),,tests/setup/packages.sh $(PKG_DEB))
	+@$(if $(HAVE_CUDA),$(SUBMAKE) -s fatbins)
	@mkdir -p $O
	+@config/debian/build.sh $O/deb $(VERSION) $(COMMIT) '$(if $(HAVE_CUDA),$(NVCC))' '$(if $(HAVE_CUDA),$(abspath $(FATBINS)))' >$O/deb.log 2>&1 || \
	    { tail -n 40 $O/deb.log; echo "make deb failed; $O/deb.log has all of it" >&2; exit 1; }
	@ls -1 $O/deb/*.deb

wheel: setup-build ## the Python client with the libraries in it; of others it needs libcrypto.so.3 only
	+@$(SUBMAKE) $(PORTABLE) $(PORTABLE_CUDA)
	@$(if $(filter no,$(SETUP)),,tests/setup/packages.sh python3 python3-pip python3-wheel python3-setuptools)
	rm -rf $O/wheel
	mkdir -p $O/wheel
	cp -r client/python $O/wheel/src
	cp $(PORTABLE) $(PORTABLE_CUDA) $O/wheel/src/ucmclient
	/usr/bin/python3 -m pip -q wheel --no-deps --no-build-isolation --no-index -w $O/wheel $O/wheel/src
	@ls $O/wheel/*.whl

.PHONY: install check-built uninstall deb wheel
