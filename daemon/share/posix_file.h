/* One operation on the block files below a folder, by blocking calls of the calling thread. Any
 * thread; the promises are those of backend.h. */
#ifndef UCMD_SHARE_POSIX_FILE_H
#define UCMD_SHARE_POSIX_FILE_H

#include "daemon/share/backend.h"

/* After share_op_resolve. Returns the status for op->done_cb. */
int posix_file_run(const char *root, const struct share_temp *temps, struct share_op *op);

#endif
