# GPU support: what of CUDA there is, the kernels, the companion library. Sets CUDA_OBJ (linked into the daemon),
# CUDA_CPPFLAGS, CUDA_LIBS, and OTHER_CUDA: the sources of the daemon that this build leaves out.
#
# The daemon needs CUDA's headers and nvcc to build, and nothing of CUDA to start: libcuda.so.1 is
# opened while it runs. Without the toolkit, daemon/cuda/none.c takes the place of the others.

NVCC ?= $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
GPU  ?= yes
# GPU code is the same whatever compiles the rest: `make check` builds it once for all its phases.
FATBINS ?= $(BUILD)/fatbin
CUDA_HOME ?= $(or $(patsubst %/bin/nvcc,%,$(realpath $(NVCC))),/usr/local/cuda)
HAVE_CUDA := $(and $(filter-out no,$(GPU)),$(NVCC),$(wildcard $(CUDA_HOME)/include/cuda.h))

ifneq ($(HAVE_CUDA),)

OTHER_CUDA    := daemon/cuda/none.c
CUDA_CPPFLAGS := -isystem $(CUDA_HOME)/include
CUDA_OBJ      := $O/obj/kernels/copy_fatbin.o
CUDA_ARCHS    ?= -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 \
                 -gencode arch=compute_80,code=compute_80
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
$O/$(CUDA_SO).$(VERSION): $(CUDA_CLIENT) $O/obj/proto/staging.o $(CUDA_OBJ) $(SPARSE_CUDA_OBJ) client/cuda/libucmclient_cuda.map $O/$(SO) $(SPARSE_OBJ) $(ENCODING_OBJ) $(call obj,kernels/isa.c)
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
$(BENCH_FATBIN): client/bench/kernels.cu client/bench/kernels.h kernels/copy.cu kernels/copy.cuh kernels/copy.h
	@mkdir -p $(@D)
	$(NVCC) -I. -O3 -fatbin $(CUDA_ARCHS) $< -o $@

ALL_FATBINS := $(SPARSE_FATBIN) $(RARE_FATBIN) $(CLUSTER_FATBIN) $(SLOTS_FATBIN) $(ATTEND_FATBIN) $(ENCODING_FATBIN) $(ROPE_FATBIN) $(CUDA_FATBIN) $(BENCH_FATBIN)
fatbins: $(ALL_FATBINS)
else
OTHER_CUDA := $(filter-out daemon/cuda/none.c,$(wildcard daemon/cuda/*.c))
endif
.PHONY: fatbins
