/* key files: which keys have encrypted the files of a root that is a directory here. A file names
 * its key in its header alone, so this reads the beginning of each file. It asks no daemon, changes
 * nothing, and needs no key. */
#include "client/ctl/ctl.h"
#include "daemon/format/block_header.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define KEYS_MAX 1024u /* more are counted together */

struct encrypted {
    uint8_t id[BLOCK_FILE_KEY_ID_BYTES];
    uint64_t files, bytes;
};

struct found {
    struct encrypted key[KEYS_MAX];
    unsigned n;
    struct encrypted plaintext, others; /* encrypted by none; by keys beyond KEYS_MAX */
    uint64_t damaged, unread;           /* files */
    uint64_t
        passed_over; /* buckets: any process that may write to the root can put anything there */
};

static struct encrypted *key_of(struct found *f, const uint8_t *id)
{
    for (unsigned i = 0; i < f->n; i++)
        if (memcmp(f->key[i].id, id, sizeof(f->key[i].id)) == 0)
            return &f->key[i];
    if (f->n == KEYS_MAX)
        return &f->others;
    memcpy(f->key[f->n].id, id, sizeof(f->key[f->n].id));
    return &f->key[f->n++];
}

static void file_look(struct found *f, int bucket, const char *name)
{
    uint8_t bytes[BLOCK_FILE_HEADER_BYTES + BLOCK_FILE_ENCRYPTION_BYTES];
    struct block_file_header h;
    struct block_file_encryption encryption;
    struct encrypted *key = &f->plaintext;
    struct stat st;
    int fd = openat(bucket, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    ssize_t n = fd >= 0 ? pread(fd, bytes, sizeof bytes, 0) : -1;

    if (fd < 0 || n < 0 || fstat(fd, &st) < 0) {
        f->unread += errno != ENOENT; /* collected meanwhile */
    } else if (n < (ssize_t)BLOCK_FILE_HEADER_BYTES || block_file_peek(bytes, &h) != 0 ||
               (h.encrypted && n < (ssize_t)sizeof bytes)) {
        f->damaged++;
    } else {
        if (h.encrypted) {
            block_file_encryption_decode(bytes + BLOCK_FILE_HEADER_BYTES, &encryption);
            key = key_of(f, encryption.key_id);
        }
        key->files++;
        key->bytes += (uint64_t)st.st_size;
    }
    if (fd >= 0)
        close(fd);
}

/* Names of block files begin with a digit of the key; the collector's marker is all zeros. */
static bool is_block(const char *name)
{
    return strspn(name, "0123456789abcdef") >= 2 && name[strspn(name, "0-")] != '\0';
}

/* 0, or -errno: the bucket could not be listed. */
static int bucket_look(struct found *f, int blocks, const char *name)
{
    int fd = openat(blocks, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), rc;
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    struct dirent *e;

    if (!dir) {
        rc = errno == ENOENT ? 0 : -errno;
        if (fd >= 0)
            close(fd);
        return rc;
    }
    for (errno = 0; (e = readdir(dir)); errno = 0)
        if (is_block(e->d_name))
            file_look(f, dirfd(dir), e->d_name);
    rc = -errno;
    closedir(dir);
    return rc;
}

static int root_look(struct found *f, const char *directory)
{
    char path[4096], name[3];
    int blocks, rc;

    if (snprintf(path, sizeof path, "%s/blocks", directory) >= (int)sizeof path)
        return -ENAMETOOLONG;
    blocks = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (blocks < 0)
        return -errno;
    for (unsigned i = 0; i < BLOCK_FILE_BUCKETS; i++) {
        snprintf(name, sizeof name, "%02x", i);
        rc = bucket_look(f, blocks, name);
        if (rc == 0)
            continue;
        fprintf(stderr, "ucmctl: %s/%s: %s; passed over\n", path, name, strerror(-rc));
        f->passed_over++;
    }
    close(blocks);
    return 0;
}

/* ---- what is shown ---- */

static void id_text(const struct encrypted *key, char out[2 * BLOCK_FILE_KEY_ID_BYTES + 1])
{
    for (unsigned i = 0; i < BLOCK_FILE_KEY_ID_BYTES; i++)
        snprintf(out + 2 * (size_t)i, 3, "%02x", key->id[i]);
}

static void row(struct table *t, const char *name, const struct encrypted *key)
{
    char bytes[HUMAN_BYTES];

    if (key->files == 0)
        return;
    table_cell(t, "%s", name);
    table_cell(t, "%" PRIu64, key->files);
    table_cell(t, "%s", human_bytes(bytes, key->bytes));
}

static void table_show(const struct found *f)
{
    static const char *const titles[] = {"KEY", ">FILES", ">BYTES", NULL};
    char id[2 * BLOCK_FILE_KEY_ID_BYTES + 1];
    struct table t;

    table_begin(&t, titles);
    for (unsigned i = 0; i < f->n; i++) {
        id_text(&f->key[i], id);
        row(&t, id, &f->key[i]);
    }
    row(&t, "other keys", &f->others);
    row(&t, "not encrypted", &f->plaintext);
    (void)table_end(&t, stdout);
    if (f->damaged > 0)
        printf("%" PRIu64 " files are damaged, or no block files\n", f->damaged);
}

static cJSON *encrypted_json(const char *name, const struct encrypted *key)
{
    cJSON *j = cJSON_CreateObject();

    if (name)
        cJSON_AddStringToObject(j, "key", name);
    cJSON_AddItemToObject(j, "files", answer_json_u64(key->files));
    cJSON_AddItemToObject(j, "bytes", answer_json_u64(key->bytes));
    return j;
}

static int json_show(const struct found *f)
{
    cJSON *j = cJSON_CreateObject(), *keys = cJSON_AddArrayToObject(j, "keys");
    char id[2 * BLOCK_FILE_KEY_ID_BYTES + 1];

    for (unsigned i = 0; i < f->n; i++) {
        id_text(&f->key[i], id);
        cJSON_AddItemToArray(keys, encrypted_json(id, &f->key[i]));
    }
    cJSON_AddItemToObject(j, "other_keys", encrypted_json(NULL, &f->others));
    cJSON_AddItemToObject(j, "plaintext", encrypted_json(NULL, &f->plaintext));
    cJSON_AddItemToObject(j, "damaged", answer_json_u64(f->damaged));
    cJSON_AddItemToObject(j, "unread", answer_json_u64(f->unread));
    cJSON_AddItemToObject(j, "directories_passed_over", answer_json_u64(f->passed_over));
    return ctl_print_json(j, false);
}

int key_files(const struct args *a, const char *directory)
{
    struct found *f = calloc(1, sizeof *f);
    int rc = f ? root_look(f, directory) : -ENOMEM;

    if (rc < 0) {
        free(f);
        return program_fail(
            CTL_ERROR, "%s: %s; name the directory of a root (shared.roots), where it is mounted",
            directory, strerror(-rc));
    }
    rc = CTL_OK;
    if (args_given(a, "json"))
        rc = json_show(f);
    else
        table_show(f);
    if (f->unread > 0)
        rc = program_fail(CTL_ERROR,
                          "%" PRIu64
                          " files could not be read: run it as root, or as the daemon's user",
                          f->unread);
    if (f->passed_over > 0)
        rc = program_fail(CTL_CORRUPT,
                          "%" PRIu64 " directories were passed over: keys may have encrypted files "
                          "there that are not counted",
                          f->passed_over);
    free(f);
    return rc;
}
