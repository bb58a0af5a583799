#include "tests/integration/roots/nfs_server.h"

#include "tests/runner/halt.h"

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define GANESHA "/usr/bin/ganesha.nfsd"
#define RPCBIND "/usr/sbin/rpcbind"
#define RPCBIND_PORT 111
#define WAIT_MS 20000

static const char config[] =
    "NFS_CORE_PARAM {\n"
    "    NFS_Protocols = 3; NFS_Port = %d; MNT_Port = %d;\n"
    "    Enable_UDP = false; Enable_NLM = false; Enable_RQUOTA = false; mount_path_pseudo = true;\n"
    "}\n"
    "MDCACHE { Dir_Chunk = 0; }\n" /* tests change files beneath it */
    "NFS_KRB5 { Active_krb5 = false; }\n"
    "EXPORT_DEFAULTS { Access_Type = RW; Squash = No_Root_Squash; SecType = sys; Protocols = 3;\n"
    "    Attr_Expiration_Time = 0; }\n"
    "EXPORT { Export_Id = 1; Path = %s; Pseudo = /kv; FSAL { Name = VFS; } }\n"
    "LOG { Default_Log_Level = WARN; }\n";

static void pause_ms(long ms)
{
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
}

static bool loopback_up(void)
{
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool up = fd >= 0 && ioctl(fd, SIOCSIFFLAGS, &request) == 0;

    if (fd >= 0)
        close(fd);
    return up;
}

/* Ganesha's VFS backend keeps files by their handles. */
static bool handles_work(const char *directory)
{
    struct {
        struct file_handle head;
        char bytes[MAX_HANDLE_SZ];
    } handle = {.head.handle_bytes = MAX_HANDLE_SZ};
    int mount_id, place, fd;

    if (name_to_handle_at(AT_FDCWD, directory, &handle.head, &mount_id, 0) < 0)
        return false;
    place = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (place < 0)
        return false;
    fd = open_by_handle_at(place, &handle.head, O_RDONLY | O_CLOEXEC);
    close(place);
    if (fd < 0)
        return false;
    close(fd);
    return true;
}

static const char *directory_of_tests(void)
{
    const char *disk = getenv("UCM_TEST_DISK");

    return disk ? disk : "/var/tmp";
}

const char *nfs_server_lacks(void)
{
    if (access(GANESHA, X_OK) < 0 || access(RPCBIND, X_OK) < 0)
        return "nfs-ganesha or rpcbind is not installed";
    if (!handles_work(directory_of_tests()))
        return "no open_by_handle_at for the tests' directory: nfs-ganesha could not serve it";
    /* rpcbind keeps files in /run: the machine's own are left alone. */
    if (unshare(CLONE_NEWNET | CLONE_NEWNS) < 0)
        return "no network and mount namespaces of its own for the server";
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
        mount("run", "/run", "tmpfs", 0, NULL) < 0 || !loopback_up())
        return "nothing can be set up in a namespace";
    return NULL;
}

static bool answers(int port)
{
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool up = fd >= 0 && connect(fd, (struct sockaddr *)&to, sizeof(to)) == 0;

    if (fd >= 0)
        close(fd);
    return up;
}

static pid_t spawn(char *const argv[])
{
    pid_t pid = fork();

    if (pid == 0) {
        int fd = open("/dev/null", O_RDWR);

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (fd >= 0) {
            dup2(fd, STDIN_FILENO);
            dup2(fd, STDOUT_FILENO);
            dup2(fd, STDERR_FILENO);
        }
        unsetenv("LD_PRELOAD");
        execv(argv[0], argv);
        _exit(127);
    }
    cr_assert(pid > 0);
    return pid;
}

static void print_log(const struct nfs_server *s)
{
    char path[256], line[512];
    FILE *file;

    snprintf(path, sizeof(path), "%s/log", s->directory);
    file = fopen(path, "r");
    while (file && fgets(line, sizeof(line), file))
        fputs(line, stderr);
    if (file)
        fclose(file);
}

static void await(const struct nfs_server *s, pid_t pid, int port)
{
    for (int waited = 0; !answers(port); waited += 20) {
        bool gone = waitpid(pid, NULL, WNOHANG) != 0;

        if (gone || waited >= WAIT_MS)
            print_log(s);
        cr_assert(!gone && waited < WAIT_MS, "nothing answers at port %d", port);
        pause_ms(20);
    }
}

void nfs_server_start(struct nfs_server *s)
{
    char file[160], log[160], pid[160];

    snprintf(file, sizeof(file), "%s/conf", s->directory);
    snprintf(log, sizeof(log), "%s/log", s->directory);
    snprintf(pid, sizeof(pid), "%s/pid", s->directory);
    s->pid = spawn((char *[]){GANESHA, "-F", "-f", file, "-L", log, "-p", pid, NULL});
    await(s, s->pid, NFS_SERVER_PORT);
    await(s, s->pid, NFS_SERVER_MOUNT_PORT);
}

void nfs_server_open(struct nfs_server *s)
{
    char path[160];
    FILE *file;

    memset(s, 0, sizeof(*s));
    snprintf(s->directory, sizeof(s->directory), "%s/ucm-nfs-XXXXXX", directory_of_tests());
    cr_assert_not_null(mkdtemp(s->directory));
    snprintf(s->export, sizeof(s->export), "%s/export", s->directory);
    cr_assert_eq(mkdir(s->export, 0700), 0);
    snprintf(s->url, sizeof(s->url), "nfs://127.0.0.1/kv?nfsport=%d&mountport=%d", NFS_SERVER_PORT,
             NFS_SERVER_MOUNT_PORT);
    snprintf(path, sizeof(path), "%s/conf", s->directory);
    file = fopen(path, "w");
    cr_assert_not_null(file);
    fprintf(file, config, NFS_SERVER_PORT, NFS_SERVER_MOUNT_PORT, s->export);
    cr_assert_eq(fclose(file), 0);
    s->names = spawn((char *[]){RPCBIND, "-f", "-w", NULL});
    await(s, s->names, RPCBIND_PORT);
    nfs_server_start(s);
}

static void end(pid_t pid)
{
    if (pid <= 0)
        return;
    kill(pid, SIGKILL);
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        ;
}

void nfs_server_kill(struct nfs_server *s)
{
    end(s->pid);
    s->pid = 0;
}

void nfs_server_hang(struct nfs_server *s, bool hang)
{
    if (hang)
        halt(s->pid);
    else
        cr_assert_eq(kill(s->pid, SIGCONT), 0);
}

void nfs_server_close(struct nfs_server *s)
{
    pid_t pid;

    nfs_server_kill(s);
    end(s->names);
    pid = spawn((char *[]){"/bin/rm", "-rf", "--", s->directory, NULL});
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        ;
}
