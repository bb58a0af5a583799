/* One operation on a block file below a folder, in the thread that calls: plain blocking calls.
 * Any thread; the promises are backend.h's. */
#ifndef UCMD_SHARE_POSIX_FILE_H
#define UCMD_SHARE_POSIX_FILE_H

#include "daemon/share/backend.h"
#include "daemon/share/posix_folder.h"

/* op was placed. What op->done is to be told. */
int posix_file_run(struct posix_folders *folders, const struct share_temp *temp,
                   struct share_op *op);

#endif
