# GPU support: what of CUDA there is, the kernels, the tests that need a GPU. Included by the Makefile,
# after its source lists and before its objects; sets CUDA_OBJ, CUDA_CPPFLAGS, CUDA_LIBS.
#
# The daemon needs CUDA's headers and nvcc to build, and nothing of CUDA to start: libcuda.so.1 is
# opened while it runs. Without the toolkit, daemon/device/cuda_none.c takes the place of the others.

CUDA_HOME ?= $(or $(patsubst %/bin/nvcc,%,$(realpath $(NVCC))),/usr/local/cuda)
HAVE_CUDA := $(and $(NVCC),$(wildcard $(CUDA_HOME)/include/cuda.h))

CUDA_FILES := $(wildcard daemon/device/cuda*.c)
ifneq ($(HAVE_CUDA),)

DAEMON_SRC    := $(filter-out daemon/device/cuda_none.c,$(DAEMON_SRC))
CUDA_CPPFLAGS := -isystem $(CUDA_HOME)/include
CUDA_OBJ      := $O/obj/kernels/copy_fatbin.o
CUDA_ARCHS    ?= -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 \
                 -gencode arch=compute_80,code=compute_80
# GPU code is the same whatever compiles the rest: `make check` builds it once for all its phases.
FATBINS       ?= $(BUILD)/fatbin
CUDA_FATBIN   := $(FATBINS)/copy.fatbin

$(CUDA_FATBIN): kernels/copy.cu kernels/copy.cuh kernels/copy.h
	@mkdir -p $(@D)
	$(NVCC) -I. -O3 -fatbin $(CUDA_ARCHS) $< -o $@
$O/obj/kernels/copy_fatbin.o: kernels/copy_fatbin.S $(CUDA_FATBIN)
	@mkdir -p $(@D)
	$(CC) -DUCM_COPY_FATBIN='"$(CUDA_FATBIN)"' -c $< -o $@

# Turned loads, for the daemon and for workers: -fmad=false, as below.
ROPE_FATBIN := $(FATBINS)/rope.fatbin
$(ROPE_FATBIN): kernels/rope/rope.cu kernels/rope/words.cuh kernels/copy.cuh kernels/copy.h $(wildcard kernels/rope/*.h) kernels/arith.h kernels/encoding/arith.h
	@mkdir -p $(@D)
	$(NVCC) -I. -O3 -fmad=false -fatbin $(ENCODING_ARCHS) $< -o $@
$O/obj/kernels/rope/rope_fatbin.o: kernels/fatbin.S $(ROPE_FATBIN)
	@mkdir -p $(@D)
	$(CC) -DUCM_FATBIN_SYMBOL=ucm_rope_fatbin -DUCM_FATBIN='"$(ROPE_FATBIN)"' -c $< -o $@
CUDA_OBJ += $O/obj/kernels/rope/rope_fatbin.o

# Encodings, for the daemon and for workers. -fmad=false, and machine code for one GPU: as below.
ENCODING_ARCHS ?= -gencode arch=compute_90,code=sm_90 -gencode arch=compute_80,code=compute_80
ENCODING_FATBIN := $(FATBINS)/encoding.fatbin
$(ENCODING_FATBIN): kernels/encoding/encoding.cu $(wildcard kernels/encoding/*.cuh kernels/encoding/*.h) kernels/arith.h kernels/copy.h
	@mkdir -p $(@D)
	$(NVCC) -I. -O3 -fmad=false -fatbin $(ENCODING_ARCHS) $< -o $@
$O/obj/kernels/encoding/encoding_fatbin.o: kernels/fatbin.S $(ENCODING_FATBIN)
	@mkdir -p $(@D)
	$(CC) -DUCM_FATBIN_SYMBOL=ucm_encoding_fatbin -DUCM_FATBIN='"$(ENCODING_FATBIN)"' -c $< -o $@
CUDA_OBJ += $O/obj/kernels/encoding/encoding_fatbin.o

# Digests and selections. -fmad=false: what is contracted is written so, in C and here. Some hundred kernels:
# machine code for one GPU; for another the driver compiles them once, when first opened, and keeps them.
SPARSE_ARCHS ?= -gencode arch=compute_80,code=sm_90 -gencode arch=compute_80,code=compute_80
SPARSE_FATBIN := $(FATBINS)/digest.fatbin $(FATBINS)/select.fatbin
SPARSE_CUDA_OBJ := $(SPARSE_FATBIN:$(FATBINS)/%.fatbin=$O/obj/kernels/sparse/%_fatbin.o)
$(SPARSE_FATBIN): $(FATBINS)/%.fatbin: kernels/sparse/%.cu kernels/sparse/%_cuda.h kernels/arith.h $(addprefix kernels/sparse/,arith.h select.h sparse.h warp.cuh)
	@mkdir -p $(@D)
	$(NVCC) -I. -O3 -fmad=false -fatbin $(SPARSE_ARCHS) $< -o $@
$(FATBINS)/digest.fatbin: $(wildcard kernels/sparse/digest_*.cuh)
$(FATBINS)/select.fatbin: $(wildcard kernels/sparse/select_*.cuh)
# Each of these kernels ends in the same functions. Compiled in one go each would get machine code of its own of them, which takes
# four times as long; so they are compiled once, and linked. 128 registers are what a thread of 512 has.
RARE_FATBIN := $(FATBINS)/select_rare.fatbin
$(RARE_FATBIN): kernels/sparse/select_rare.cu $(wildcard kernels/sparse/select_*.cuh) kernels/arith.h $(addprefix kernels/sparse/,select_cuda.h arith.h select.h sparse.h warp.cuh)
	@mkdir -p $(@D)
	$(NVCC) -I. -O3 -fmad=false -ptx -arch=compute_80 $< -o $@.ptx
	$(NVCC) -O3 -arch=sm_90 -rdc=true -maxrregcount=128 -cubin $@.ptx -o $@.parts.cubin
	$(NVCC) -arch=sm_90 -dlink -cubin $@.parts.cubin -o $@.cubin
	$(CUDA_HOME)/bin/fatbinary -64 --compress-all --create=$@ --image3=kind=elf,sm=90,file=$@.cubin --image3=kind=ptx,sm=80,file=$@.ptx
	@rm -f $@.ptx $@.parts.cubin $@.cubin
$O/obj/kernels/sparse/select_rare_fatbin.o: $(RARE_FATBIN)
SPARSE_CUDA_OBJ += $O/obj/kernels/sparse/select_rare_fatbin.o
# Clusters of thread blocks and bulk copies there are from compute capability 9.0 on.
CLUSTER_FATBIN := $(FATBINS)/select_cluster.fatbin $(FATBINS)/select_stream.fatbin
$(CLUSTER_FATBIN): $(FATBINS)/%.fatbin: kernels/sparse/%.cu $(wildcard kernels/sparse/list_*) $(addprefix kernels/sparse/select_,cuda.h cut.cuh halves.cuh item.cuh reduce.cuh sums.cuh) kernels/arith.h $(addprefix kernels/sparse/,arith.h select.h sparse.h warp.cuh)
	@mkdir -p $(@D)
	$(NVCC) -I. -O3 -fmad=false -fatbin -gencode arch=compute_90,code=[sm_90,compute_90] $< -o $@
$(FATBINS)/select_cluster.fatbin: $(wildcard kernels/sparse/cluster*)
$(FATBINS)/select_stream.fatbin: $(wildcard kernels/sparse/stream*)
$O/obj/kernels/sparse/select_cluster_fatbin.o $O/obj/kernels/sparse/select_stream_fatbin.o: $(CLUSTER_FATBIN)
SPARSE_CUDA_OBJ += $O/obj/kernels/sparse/select_cluster_fatbin.o $O/obj/kernels/sparse/select_stream_fatbin.o
$(SPARSE_CUDA_OBJ): $O/obj/kernels/sparse/%_fatbin.o: kernels/fatbin.S $(FATBINS)/%.fatbin
	@mkdir -p $(@D)
	$(CC) -DUCM_FATBIN_SYMBOL=ucm_$*_fatbin -DUCM_FATBIN='"$(FATBINS)/$*.fatbin"' -c $< -o $@

# A worker's pool, and attention over it, which from compute capability 9.0 on begins beside the gather.
DECODE_ARCHS ?= -gencode arch=compute_90,code=[sm_90,compute_90] -gencode arch=compute_80,code=compute_80
SLOTS_FATBIN := $(FATBINS)/slots.fatbin
$(SLOTS_FATBIN): kernels/slots/slots.cu $(addprefix kernels/slots/,slots.cuh slots.h slots_cuda.h) kernels/encoding/fp8.cuh kernels/encoding/rows.cuh
	@mkdir -p $(@D)
	$(NVCC) -I. -O3 -fatbin $(DECODE_ARCHS) $< -o $@
$O/obj/kernels/slots/slots_fatbin.o: kernels/fatbin.S $(SLOTS_FATBIN)
	@mkdir -p $(@D)
	$(CC) -DUCM_FATBIN_SYMBOL=ucm_slots_fatbin -DUCM_FATBIN='"$(SLOTS_FATBIN)"' -c $< -o $@
ATTEND_FATBIN := $(FATBINS)/attend.fatbin $(FATBINS)/mla.fatbin
$(ATTEND_FATBIN): $(FATBINS)/%.fatbin: kernels/attend/%.cu $(wildcard kernels/attend/attend*.cuh) kernels/arith.h $(addprefix kernels/attend/,arith.h attend_cuda.h) kernels/sparse/arith.h
	@mkdir -p $(@D)
	$(NVCC) -I. -O3 -fmad=false -fatbin $(DECODE_ARCHS) $< -o $@
$(FATBINS)/mla.fatbin: $(wildcard kernels/attend/mla*.cuh) kernels/attend/mla_cuda.h
ATTEND_CUDA_OBJ := $(ATTEND_FATBIN:$(FATBINS)/%.fatbin=$O/obj/kernels/attend/%_fatbin.o)
$(ATTEND_CUDA_OBJ): $O/obj/kernels/attend/%_fatbin.o: kernels/fatbin.S $(FATBINS)/%.fatbin
	@mkdir -p $(@D)
	$(CC) -DUCM_FATBIN_SYMBOL=ucm_$*_fatbin -DUCM_FATBIN='"$(FATBINS)/$*.fatbin"' -c $< -o $@

# What decode steps are launched with, in C too: checks of a pool's shape.
DECODE_CUDA_OBJ := $O/obj/kernels/slots/slots.o $O/obj/kernels/slots/slots_fatbin.o $(ATTEND_CUDA_OBJ)
SPARSE_CUDA_OBJ += $(DECODE_CUDA_OBJ)

$O/obj/client/cuda/sparse_select.o $O/obj/client/cuda/decode_plan.o: override CFLAGS += -fno-math-errno # the square root is an instruction, as in kernels/sparse

# The companion, for workers: libcuda is theirs already, libucmclient beside it, wherever the two lie.
CUDA_SO     := libucmclient_cuda.so
CUDA_CLIENT := $(patsubst %.c,$O/obj/%.o,$(wildcard client/cuda/*.c)) $O/obj/kernels/rope/check.o
LIBS        += $O/libucmclient_cuda.a $O/$(CUDA_SO).$(VERSION) $O/$(CUDA_SO).$(SO_VERSION) $O/$(CUDA_SO)

$O/libucmclient_cuda.a: $(CUDA_CLIENT) $O/obj/proto/staging.o $(CUDA_OBJ) $(SPARSE_CUDA_OBJ)
	@rm -f $@ && ar rcs $@ $^
$O/$(CUDA_SO).$(VERSION): $(CUDA_CLIENT) $O/obj/proto/staging.o $(CUDA_OBJ) $(SPARSE_CUDA_OBJ) client/cuda/libucmclient_cuda.map $O/$(SO)
	$(CC) $(SANFLAGS) -shared -pthread $(if $(SAN),,-Wl,-z,defs) -Wl,-soname,$(CUDA_SO).$(SO_VERSION) -Wl,-z,relro,-z,now \
	    -Wl,--version-script=client/cuda/libucmclient_cuda.map -Wl,-rpath,'$$ORIGIN' $(LDFLAGS) $(filter %.o,$^) \
	    -L$O -lucmclient -L$(CUDA_HOME)/lib64/stubs -lcuda -o $@
$O/$(CUDA_SO).$(SO_VERSION): $O/$(CUDA_SO).$(VERSION)
	@ln -sf $(<F) $@
# Portable as it is: beyond the two it needs the C library only.
PORTABLE_CUDA := $O/$(CUDA_SO).$(SO_VERSION)
$O/$(CUDA_SO): $O/$(CUDA_SO).$(SO_VERSION)
	@ln -sf $(<F) $@

# What ucm-bench runs on a GPU.
BENCH_FATBIN := $(FATBINS)/bench.fatbin
$(BENCH_FATBIN): tests/bench/ucm_bench_kernels.cu tests/bench/ucm_bench_kernels.h kernels/copy.cu kernels/copy.cuh kernels/copy.h
	@mkdir -p $(@D)
	$(NVCC) -I. -O3 -fatbin $(CUDA_ARCHS) $< -o $@

fatbins: $(SPARSE_FATBIN) $(RARE_FATBIN) $(CLUSTER_FATBIN) $(SLOTS_FATBIN) $(ATTEND_FATBIN) $(ENCODING_FATBIN) $(ROPE_FATBIN) $(CUDA_FATBIN) $(BENCH_FATBIN)

# Unit tests of the device room and the companion over a driver that the tests bring: no GPU is needed.
UNIT_SRC  += $(wildcard tests/unit/cuda/test_*.c)
FAKE_CUDA := $(addprefix $O/obj/tests/unit/cuda/,fake_cuda.o fake_cuda_copy.o fake_cuda_driver.o)
# A static rule, or make prefers the general one while an object of this one is still to be made.
CUDA_UNIT := $(patsubst tests/%.c,$O/tests/%,$(wildcard tests/unit/cuda/test_*.c))
$(CUDA_UNIT): $O/tests/unit/cuda/%: $O/obj/tests/unit/cuda/%.o $(FAKE_CUDA) \
                      $(CUDA_CLIENT) $(SPARSE_CUDA_OBJ) $O/obj/tests/runner/runner.o $O/obj/tests/runner/bytes.o $O/libucmtools.a $O/libucmclient.a $O/libucmdaemon.a
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(LINK_TEST) -Wl,--wrap=job_clock_ms $(WRAPPED) $^ $(DAEMON_LIBS) -lcjson -lcriterion -o $@

$O/tests/unit/cuda/test_cuda_decode_window: WRAPPED = $(addprefix -Wl$(comma)--wrap=ucm_window_,info mappings release address)

# Tests of the device room on a GPU, with workers written in CUDA.
GPU_SRC    := client/cuda/companion.c client/cuda/companion_encoding.c client/cuda/companion_rope.c tests/gpu/worker_staging.c
GPU_OBJ    := $(GPU_SRC:%.c=$O/obj/%.o) $O/libucmdaemon.a
GPU_TESTS  := $(patsubst tests/gpu/%.c,$O/gpu/%,$(wildcard tests/gpu/test_*.c))

$O/obj/tests/gpu/%.o: tests/gpu/%.cu tests/gpu/worker.h tests/gpu/worker_staging.h
	@mkdir -p $(@D)
	$(NVCC) -I. -O2 $(CUDA_ARCHS) -c $< -o $@
$O/gpu/test_%: $O/obj/tests/gpu/test_%.o $(addprefix $O/obj/tests/gpu/,harness.o staging.o worker.o) $(GPU_OBJ)
	@mkdir -p $(@D)
	$(LINK) $^ $(DAEMON_LIBS) -L$(CUDA_HOME)/lib64 -L$(CUDA_HOME)/lib64/stubs -lcuda -lcudart_static -ldl -lrt -lstdc++ -o $@
# The daemon as a whole on a GPU: a client program in CUDA, and the daemon that it starts.
SERVE_OBJ := $(addprefix $O/obj/tests/gpu/,serve.o serve_encoded.o serve_roles.o serve_stream.o serve_worker.o)
$(SERVE_OBJ): $O/obj/tests/gpu/%.o: tests/gpu/%.cu tests/gpu/serve.h client/include/ucmclient.h client/include/ucmclient_cuda.h
	@mkdir -p $(@D)
	$(NVCC) -I. -Iclient/include -O2 $(CUDA_ARCHS) -c $< -o $@
$O/gpu/test_serve: $(SERVE_OBJ) $O/obj/tests/gpu/serve_ring.o $O/libucmclient_cuda.a $O/libucmclient.a
	@mkdir -p $(@D)
	$(LINK) $^ $(CLIENT_LIBS) -L$(CUDA_HOME)/lib64 -L$(CUDA_HOME)/lib64/stubs -lcuda -lcudart_static -ldl -lrt -lstdc++ -o $@
GPU_TESTS += $O/gpu/test_serve
# Kernels on a GPU beside the same in C: digests and selections, encodings, attention.
SPARSE_TEST_OBJ   := $(patsubst %.c,$O/obj/%.o,tests/gpu/compare.c $(wildcard tests/gpu/sparse*.c))
ENCODING_TEST_OBJ := $(patsubst %.c,$O/obj/%.o,tests/gpu/compare.c $(wildcard tests/gpu/encoding*.c))
$O/gpu/test_sparse: $(SPARSE_TEST_OBJ) $O/obj/tests/bench/ucm_bench_fatbin.o $O/libucmclient_cuda.a $O/libucmclient.a
	@mkdir -p $(@D)
	$(LINK) $^ -Wl,--as-needed $(CLIENT_LIBS) -L$(CUDA_HOME)/lib64/stubs -lcuda -o $@
$O/gpu/test_encoding: $(ENCODING_TEST_OBJ) $O/obj/tests/bench/ucm_bench_fatbin.o $O/obj/kernels/encoding/encoding_fatbin.o $O/libucmclient.a
	@mkdir -p $(@D)
	$(LINK) $^ -Wl,--as-needed $(CLIENT_LIBS) -L$(CUDA_HOME)/lib64/stubs -lcuda -o $@
ROPE_TEST_OBJ := $(patsubst %.c,$O/obj/%.o,tests/gpu/compare.c tests/gpu/rope.c kernels/copy_ref.c)
$O/gpu/test_rope: $(ROPE_TEST_OBJ) $(CUDA_OBJ) $O/libucmdaemon.a
	@mkdir -p $(@D)
	$(LINK) $^ -Wl,--as-needed -L$(CUDA_HOME)/lib64/stubs -lcuda -lm -o $@
SLOTS_TEST_OBJ    := $(patsubst %.c,$O/obj/%.o,tests/gpu/compare.c tests/gpu/window.c $(wildcard tests/gpu/slots*.c) $(wildcard kernels/slots/*.c))
$O/gpu/test_slots: $(SLOTS_TEST_OBJ) $O/obj/kernels/slots/slots_fatbin.o
	@mkdir -p $(@D)
	$(LINK) $^ -L$(CUDA_HOME)/lib64/stubs -lcuda -o $@
ATTEND_TEST_OBJ := $(patsubst %.c,$O/obj/%.o,tests/gpu/compare.c $(wildcard tests/gpu/attend*.c) $(wildcard kernels/slots/*.c))
$O/gpu/test_attend: $(ATTEND_TEST_OBJ) $(ATTEND_CUDA_OBJ) $O/obj/kernels/slots/slots_fatbin.o $O/libucmtools.a $O/libucmclient.a
	@mkdir -p $(@D)
	$(LINK) $^ -Wl,--as-needed $(CLIENT_LIBS) -L$(CUDA_HOME)/lib64/stubs -lcuda -lm -o $@
DECODE_TEST_OBJ := $(patsubst %.c,$O/obj/%.o,tests/gpu/compare.c tests/gpu/window.c $(wildcard tests/gpu/decode*.c)) \
                   $(patsubst %.c,$O/obj/%.o,kernels/slots/verify.c)
$O/gpu/test_decode: $(DECODE_TEST_OBJ) $O/libucmclient_cuda.a $O/libucmtools.a $O/libucmclient.a
	@mkdir -p $(@D)
	$(LINK) $^ -Wl,--as-needed $(CLIENT_LIBS) -L$(CUDA_HOME)/lib64/stubs -lcuda -lm -o $@
GPU_TESTS += $O/gpu/test_sparse $O/gpu/test_encoding $O/gpu/test_rope $O/gpu/test_slots $O/gpu/test_attend $O/gpu/test_decode
# Companions for Python tests that speak the protocol by themselves.
GPU_COMPANIONS := $O/gpu/companions.so
$(GPU_COMPANIONS): $O/obj/tests/gpu/companions.o $O/libucmclient_cuda.a $O/libucmclient.a
	@mkdir -p $(@D)
	$(CC) -shared -pthread $(LDFLAGS) $^ $(CLIENT_LIBS) -L$(CUDA_HOME)/lib64/stubs -lcuda -o $@

# A folder that runs on a host with a GPU and without Debian's packages: programs, the libraries that
# they need beyond the C library, and run.sh.
gpu-bundle: $(GPU_TESTS) $(GPU_COMPANIONS) $(LIBS) $O/portable/libucmclient.so.0 $O/encoding_kernels.so
	rm -rf $O/gpu/python
	@mkdir -p $O/gpu/lib $O/gpu/python/client $O/gpu/python/tests/integration $O/gpu/python/tests/bench
	cp -r client/python $O/gpu/python/client
	cp $O/portable/libucmclient.so.0 $(PORTABLE_CUDA) $O/gpu/python/client/python/ucmclient
	cp -r tests/vllm $O/gpu/python/tests
	cp $(addprefix tests/integration/,daemon.py vllm_case.py vllm_paths.py test_vllm_connector.py test_vllm_trouble.py test_vllm_companion.py cuda_paths.py fake_tensor.py fake_source.py test_sparse_cuda.py test_decode_cuda.py test_decode_gpu.py second_client.py encoding_case.py encoding_gpu.py test_encoding.py test_encoding_life.py test_encoding_hostile.py test_forms.py) $O/gpu/python/tests/integration
	@mkdir -p $O/gpu/python/docs
	cp docs/protocol.md $O/gpu/python/docs
	cp $O/encoding_kernels.so $O/gpu
	cp $(addprefix tests/bench/,ttft.py blend_ttft.py engines.py) $(wildcard tests/bench/llama*.py tests/bench/decode*.py) $O/gpu/python/tests/bench
	@mkdir -p $O/gpu/python/tests/gpu $O/gpu/python/systemd
	cp tests/gpu/isolation.py tests/gpu/isolated_worker.py tests/gpu/sandbox.py tests/gpu/theft.py tests/gpu/turned.py $O/gpu/python/tests/gpu
	cp systemd/ucmd.service $O/gpu/python/systemd
	-systemd-analyze syscall-filter --no-pager >$O/gpu/python/tests/gpu/syscall-groups.txt
	-cp -L $$(/sbin/ldconfig -p | awk '/libseccomp.so.2/ {print $$NF; exit}') $O/gpu/lib
	rm -f $(filter-out $(GPU_TESTS),$(wildcard $O/gpu/test_*))
	cp tests/gpu/run.sh tests/gpu/all.sh tests/gpu/table.py tests/gpu/attend_torch.py $(BINS) $O/gpu
	cp $O/$(SO).$(SO_VERSION) $O/$(CUDA_SO).$(SO_VERSION) $O/gpu/lib
	ldd $(GPU_TESTS) $(BINS) | awk '/=> \// {print $$3}' | sort -u | \
	    grep -vE '/(libc|libm|libdl|librt|libpthread|libresolv|libstdc\+\+|libgcc_s|libcuda|ld-linux[^/]*)\.so' | \
	    xargs -I '{}' cp -L '{}' $O/gpu/lib
gpu-tests: $(GPU_TESTS) $(GPU_COMPANIONS)
.PHONY: gpu-bundle gpu-tests

else
DAEMON_SRC := $(filter-out $(filter-out daemon/device/cuda_none.c,$(CUDA_FILES)),$(DAEMON_SRC))
endif
