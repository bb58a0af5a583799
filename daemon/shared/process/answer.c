/* What a process answers: which rules it must keep, and what its answer means. */
#include "daemon/shared/process/process.h"

static const int statuses[WIRE_STATUSES] = {
    [WIRE_OK] = 0,
    [WIRE_MORE] = 0,
    [WIRE_MISSING] = -ENOENT,
    [WIRE_EXISTS] = -EEXIST,
    [WIRE_OTHER] = -EBADMSG,
    [WIRE_ABSENT] = -ENODEV,
    [WIRE_FULL] = -ENOSPC,
    [WIRE_READ_ONLY] = -EROFS,
    [WIRE_DENIED] = -EACCES,
    [WIRE_UNREACHABLE] = -EHOSTUNREACH,
    [WIRE_TIMEOUT] = -ETIMEDOUT,
    [WIRE_FAILED] = -EIO,
};

/* NULL, or which rule the answer breaks. */
static const char *rule_broken(const struct process_call *c, const struct wire_answer *a)
{
    bool ok = a->status == WIRE_OK;

    if (a->status == WIRE_MORE && c->verb != SHARED_LIST)
        return "\"more\" is for a list only";
    if (a->status == WIRE_EXISTS && c->verb != SHARED_WRITE)
        return "\"exists\" is for a write only";
    if (a->files && c->verb != SHARED_LIST)
        return "\"files\" are of a list only";
    if (ok && (c->verb == SHARED_FIND || c->verb == SHARED_READ) && !a->has_bytes)
        return "\"bytes\" is missing";
    if (ok && c->verb == SHARED_CHECK && c->op && c->op->sync && !a->has_now)
        return "\"now\" is missing";
    return NULL;
}

/* 0, -ENOMEM, or -EPROTO with *why. */
static int files_take(struct process_call *c, const struct wire_answer *a, const char **why)
{
    struct wire_file file;
    struct ucm_error e;
    int rc = 0;

    for (uint32_t i = 0; rc == 0 && a->files && i < a->files->size; i++) {
        if (wire_file_at(a, i, &file, &e) < 0) {
            *why = "\"files\" has an entry that is not [name, bytes, mtime]";
            return -EPROTO;
        }
        if (shared_listing_wants(file.name))
            rc = shared_listing_add(&c->listing, file.name, file.bytes, file.mtime_ns);
    }
    c->listing.unread = a->unread < UINT32_MAX ? (uint32_t)a->unread : UINT32_MAX;
    return rc;
}

/* An answer about a file says nothing about a root or a bucket. */
static int status_of(struct process_call *c, const struct wire_answer *a)
{
    int status = statuses[a->status];
    bool of_file = c->verb != SHARED_CHECK && c->verb != SHARED_LIST;

    if (!of_file && (a->status == WIRE_MISSING || a->status == WIRE_OTHER))
        return -EIO;
    if (status == 0 && c->verb == SHARED_LIST && c->listing.unread > SHARED_LISTING_UNREAD)
        return -EIO;
    if (status == 0 && c->op && (c->verb == SHARED_FIND || c->verb == SHARED_READ) &&
        a->bytes != shared_op_file_bytes(c->op))
        return -EBADMSG;
    return status;
}

int process_answer_take(struct process_call *c, const struct wire_answer *a, const char **why)
{
    int status;

    *why = rule_broken(c, a);
    if (*why)
        return -EPROTO;
    status = c->verb == SHARED_LIST ? files_take(c, a, why) : 0;
    if (status < 0)
        return status;
    return a->status == WIRE_MORE ? PROCESS_MORE : status_of(c, a);
}
