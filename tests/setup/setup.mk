# Debian packages that builds and tests need, and their installation

# Packages that the build needs, and those that only tests need.
PKG_BUILD := build-essential python3 libuv1-dev liburing-dev libmsgpack-dev libssl-dev libxxhash-dev \
             libyaml-dev libcjson-dev libsystemd-dev libmicrohttpd-dev libnfs-dev libcurl4-openssl-dev libexpat1-dev libzmq3-dev
PKG_CHECK := $(PKG_BUILD) clang libclang-rt-14-dev llvm libcriterion-dev pkg-config python3-msgpack python3-numpy python3-pip python3-yaml python3-zmq \
             nfs-ganesha nfs-ganesha-vfs python3-swift rpcbind iproute2 prometheus man-db groff-base lld
# The test names runc: Debian's crun refuses to run where cgroup v1 and v2 are mixed.
PKG_IMAGE := podman runc python3-msgpack python3-yaml

setup: setup-check ## install the Debian packages that `make check` needs, where any is missing, and fetch Mooncake's client from PyPI if that answers
	@$(TRY_MOONCAKE)

# Only a hint, and only before the first build: a library may come from elsewhere.
missing-packages:
	@$(if $(wildcard $(BUILT)),,tests/setup/packages.sh --missing $(PKG_BUILD))

setup-check:
	@$(if $(filter no,$(SETUP)),,tests/setup/packages.sh $(PKG_CHECK))

# tests/check.sh makes it next to the first build.
setup-mooncake:
	@$(TRY_MOONCAKE)

# PyPI may not answer.
TRY_MOONCAKE = $(if $(filter no,$(SETUP)),,timeout 180 tests/setup/mooncake.sh $(MOONCAKE_VENV) || \
    echo "ucmd: no Mooncake client from PyPI: tests with its real master are left out" >&2)

setup-build:
	@$(if $(filter no,$(SETUP)),,tests/setup/packages.sh $(PKG_BUILD))

.PHONY: setup missing-packages setup-check setup-mooncake setup-build
