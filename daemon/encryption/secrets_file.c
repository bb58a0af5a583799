#include "daemon/encryption/secrets_file.h"

#include "daemon/base/kill_point.h"
#include "daemon/encryption/box.h"
#include "daemon/format/bytes.h"
#include "daemon/format/checksum.h"
#include "daemon/format/io.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC "UCMSECR1"
#define FILE_BYTES 64u
#define AT_FINGERPRINT 8u
#define AT_SECRET 40u
#define AT_SUM 56u
#define NAME_BYTES (2 * UCM_FINGERPRINT_BYTES + 1)
#define TEMP_BYTES 32u

static void name_make(const uint8_t *fingerprint, char out[NAME_BYTES])
{
    for (unsigned i = 0; i < UCM_FINGERPRINT_BYTES; i++)
        snprintf(out + 2 * (size_t)i, 3, "%02x", fingerprint[i]);
}

static void encode(const uint8_t *fingerprint, const uint8_t *secret, uint8_t out[FILE_BYTES])
{
    memcpy(out, MAGIC, 8);
    memcpy(out + AT_FINGERPRINT, fingerprint, UCM_FINGERPRINT_BYTES);
    memcpy(out + AT_SECRET, secret, SHARED_SECRET_BYTES);
    put64(out + AT_SUM, checksum_of(out, AT_SUM));
}

static int decode(const uint8_t in[FILE_BYTES], const uint8_t *fingerprint, uint8_t *secret)
{
    if (memcmp(in, MAGIC, 8) != 0 || get64(in + AT_SUM) != checksum_of(in, AT_SUM) ||
        memcmp(in + AT_FINGERPRINT, fingerprint, UCM_FINGERPRINT_BYTES) != 0)
        return -EBADMSG;
    memcpy(secret, in + AT_SECRET, SHARED_SECRET_BYTES);
    return 0;
}

static int secret_read(int directory, const char *name, const uint8_t *fingerprint, uint8_t *secret)
{
    uint8_t bytes[FILE_BYTES];
    struct stat st;
    int fd, rc;

    if (fstatat(directory, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return -errno;
    if (!S_ISREG(st.st_mode))
        return -EBADMSG;
    fd = openat(directory, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    rc = io_read(fd, bytes, sizeof(bytes), 0);
    close(fd);
    return rc == -ENODATA ? -EBADMSG : rc < 0 ? rc : decode(bytes, fingerprint, secret);
}

/* A new secret, whole and on stable storage, under a name of its own. */
static int temp_write(int directory, const uint8_t *fingerprint, char temp[TEMP_BYTES])
{
    uint8_t bytes[FILE_BYTES], secret[SHARED_SECRET_BYTES];
    uint64_t number;
    int rc = encryption_random(&number, sizeof(number)), fd;

    if (rc == 0)
        rc = encryption_random(secret, sizeof(secret));
    if (rc < 0)
        return rc;
    snprintf(temp, TEMP_BYTES, ".tmp-%016" PRIx64, number);
    encode(fingerprint, secret, bytes);
    fd = openat(directory, temp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return -errno;
    rc = io_write(fd, bytes, sizeof(bytes), 0);
    if (rc == 0 && fsync(fd) < 0)
        rc = -errno;
    if (close(fd) < 0 && rc == 0)
        rc = -errno;
    if (rc < 0)
        unlinkat(directory, temp, 0);
    return rc;
}

static int directory_open(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    return fd < 0 ? -errno : fd;
}

static int names_sync(int directory)
{
    return fsync(directory) < 0 && errno != EINVAL ? -errno : 0;
}

/* If several hosts try at once, the first one's link succeeds. */
static int secret_make(int directory, const char *name, const uint8_t *fingerprint)
{
    char temp[TEMP_BYTES];
    int rc = temp_write(directory, fingerprint, temp);

    if (rc < 0)
        return rc;
    KILL_POINT("secret-written");
    if (linkat(directory, temp, directory, name, 0) < 0 && errno != EEXIST)
        rc = -errno;
    KILL_POINT("secret-linked");
    unlinkat(directory, temp, 0);
    return rc == 0 ? names_sync(directory) : rc;
}

int secrets_file_get(const char *path, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                     uint8_t secret[SHARED_SECRET_BYTES])
{
    int directory = directory_open(path), rc;
    char name[NAME_BYTES];

    if (directory < 0)
        return directory;
    name_make(fingerprint, name);
    rc = secret_read(directory, name, fingerprint, secret);
    if (rc == -ENOENT) {
        rc = secret_make(directory, name, fingerprint);
        if (rc == 0)
            rc = secret_read(directory, name, fingerprint, secret);
    }
    close(directory);
    return rc;
}

/* Only a file with a secret's length: any process that may write to the directory could have linked
 * something else there. */
static int old_wipe(int fd)
{
    static const uint8_t zeros[FILE_BYTES];
    struct stat st;
    int rc = fstat(fd, &st) < 0 ? -errno : 0;

    if (rc < 0 || !S_ISREG(st.st_mode) || st.st_size != FILE_BYTES)
        return rc;
    rc = io_write(fd, zeros, sizeof(zeros), 0);
    return rc == 0 && fsync(fd) < 0 ? -errno : rc;
}

int secrets_file_replace(const char *path, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                         uint8_t secret[SHARED_SECRET_BYTES])
{
    int directory = directory_open(path), old, rc;
    char name[NAME_BYTES], temp[TEMP_BYTES];

    if (directory < 0)
        return directory;
    name_make(fingerprint, name);
    rc = temp_write(directory, fingerprint, temp);
    if (rc < 0) {
        close(directory);
        return rc;
    }
    KILL_POINT("secret-written");
    old = openat(directory, name, O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    rc = old < 0 && errno != ENOENT ? -errno : 0;
    if (rc == 0 && renameat(directory, temp, directory, name) < 0)
        rc = -errno;
    KILL_POINT("secret-replaced");
    if (rc < 0)
        unlinkat(directory, temp, 0);
    if (rc == 0)
        rc = names_sync(directory);
    if (rc == 0 && old >= 0)
        rc = old_wipe(old);
    KILL_POINT("secret-wiped");
    if (old >= 0)
        close(old);
    if (rc == 0)
        rc = secret_read(directory, name, fingerprint, secret);
    close(directory);
    return rc;
}

/* A file that comes and goes: permissions alone do not say what a server makes of them. */
int secrets_file_check(const char *path)
{
    static const uint8_t nobody[UCM_FINGERPRINT_BYTES];
    int directory = directory_open(path), rc;
    char temp[TEMP_BYTES];
    struct stat st;

    if (directory < 0)
        return directory;
    rc = fstat(directory, &st) < 0 ? -errno : 0;
    if (rc == 0)
        rc = temp_write(directory, nobody, temp);
    if (rc == 0 && unlinkat(directory, temp, 0) < 0)
        rc = -errno;
    close(directory);
    return rc == 0 ? (st.st_mode & S_IWOTH) != 0 : rc;
}
