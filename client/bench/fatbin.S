/* The benchmark's kernels as read-only data, nothing when there was no toolkit: UCM_BENCH_FATBIN is
 * the path of build/bench.fatbin. */
    .section .rodata
    .global ucm_bench_fatbin, ucm_bench_fatbin_bytes
    .hidden ucm_bench_fatbin, ucm_bench_fatbin_bytes
    .balign 16
ucm_bench_fatbin:
#ifdef UCM_BENCH_FATBIN
    .incbin UCM_BENCH_FATBIN
#endif
ucm_bench_end:
    .balign 8
ucm_bench_fatbin_bytes:
    .quad ucm_bench_end - ucm_bench_fatbin
    .section .note.GNU-stack, "", %progbits
