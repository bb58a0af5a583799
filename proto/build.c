#include "proto/build.h"

#ifdef __clang__
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

const char ucm_build_commit[] = UCM_COMMIT;
const char ucm_build_options[] = COMPILER ", " UCM_BUILD_CUDA;
