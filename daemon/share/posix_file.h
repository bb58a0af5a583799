/* One operation on the block files below a folder, by blocking calls of the calling thread, past the
 * page cache. Any thread; the promises are those of backend.h. */
#ifndef UCMD_SHARE_POSIX_FILE_H
#define UCMD_SHARE_POSIX_FILE_H

#include "daemon/backend/folder.h"
#include "daemon/share/backend.h"

/* After share_op_resolve. bounce: not used by anybody else meanwhile. Returns the status for op->done_cb. */
int posix_file_run(const char *root, const struct share_temp *temps,
                   const struct uncached_bounce *bounce, struct share_op *op);

#endif
