/* What this program was built from. Only programs link it, no library: else each commit would link
 * every test again. */
#ifndef UCM_PROTO_BUILD_H
#define UCM_PROTO_BUILD_H

/* The source's commit: 12 hexadecimal digits, perhaps with "-dirty" after them, or "unknown". */
extern const char ucm_build_commit[];
/* The compiler, and whether there is CUDA: one line for people. */
extern const char ucm_build_options[];

#endif
