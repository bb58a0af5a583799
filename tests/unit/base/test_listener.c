#include "daemon/base/listener.h"
#include "proto/errors.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static char directory[64], path[96];

static void make_directory(void)
{
    strcpy(directory, "/tmp/ucmd-listener-XXXXXX");
    cr_assert_not_null(mkdtemp(directory));
    snprintf(path, sizeof(path), "%s/s", directory);
}

static void remove_directory(void)
{
    char lock[112];

    snprintf(lock, sizeof(lock), "%s.lock", path);
    unlink(path); /* there or not */
    unlink(lock);
    cr_assert_eq(rmdir(directory), 0);
}

static int connect_to_path(void)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), rc;

    strcpy(a.sun_path, path);
    rc = connect(fd, (struct sockaddr *)&a, sizeof(a)) == 0 ? 0 : -errno;
    close(fd);
    return rc;
}

TestSuite(listener, .init = make_directory, .fini = remove_directory);

Test(listener, a_path_has_its_mode_and_goes_with_its_owner)
{
    struct listener l;
    struct ucm_error e;
    struct stat st;

    cr_assert_eq(listener_unix(&l, "socket", path, 0620, "", 4, &e), 0);
    cr_assert_eq(stat(path, &st), 0);
    cr_assert(S_ISSOCK(st.st_mode));
    cr_assert_eq(st.st_mode & 0777, 0620);
    cr_assert_eq(connect_to_path(), 0);
    listener_close(&l);
    cr_assert_eq(l.fd, -1);
    cr_assert_eq(connect_to_path(), -ENOENT);
    listener_close(&l); /* harmless */
}

Test(listener, a_second_owner_is_refused_and_a_dead_ones_path_replaced)
{
    struct listener first, second;
    struct ucm_error e;

    cr_assert_eq(listener_unix(&first, "socket", path, 0600, "", 4, &e), 0);
    cr_assert_eq(listener_unix(&second, "metrics.socket", path, 0600, "", 4, &e), -EADDRINUSE);
    cr_assert_not_null(strstr(e.text, "another ucmd serves"));
    cr_assert_not_null(strstr(e.text, "set another `metrics.socket`"));
    cr_assert_eq(connect_to_path(), 0, "the loser took the winner's path");
    first.owns_path = false; /* as if it was killed: the path stays */
    listener_close(&first);
    cr_assert_eq(connect_to_path(), -ECONNREFUSED);
    cr_assert_eq(listener_unix(&second, "socket", path, 0600, "", 4, &e), 0);
    cr_assert_eq(connect_to_path(), 0);
    listener_close(&second);
}

Test(listener, what_is_wrong_with_a_path_is_said)
{
    char longer[200], missing[112];
    struct listener l;
    struct ucm_error e;

    memset(longer, 'a', sizeof(longer) - 1);
    longer[0] = '/';
    longer[sizeof(longer) - 1] = '\0';
    cr_assert_eq(listener_unix(&l, "socket", longer, 0600, "", 4, &e), -EINVAL);
    cr_assert_str_eq(e.text, "socket: a path has at most 107 bytes");
    snprintf(missing, sizeof(missing), "%s/none/s", directory);
    cr_assert_eq(listener_unix(&l, "socket", missing, 0600, "", 4, &e), -EACCES);
    cr_assert_not_null(strstr(e.text, "its directory must exist and be writable"));
    cr_assert_eq(listener_unix(&l, "socket", path, 0600, "no-such-group", 4, &e), -EACCES);
    cr_assert_not_null(strstr(e.text, "there is no such group"));
    cr_assert_eq(connect_to_path(), -ENOENT, "a failure leaves no path");
}

Test(listener, an_address_is_numbers)
{
    static const char *const wrong[] = {"",
                                        ":",
                                        "127.0.0.1",
                                        "127.0.0.1:",
                                        ":9471",
                                        "localhost:9471",
                                        "127.0.0.1:65536",
                                        "127.0.0.1:+1",
                                        "127.0.0.1: 1",
                                        "127.0.0.1:1x",
                                        "999999",
                                        "[::1]",
                                        "[::1]9471",
                                        "[]:9471",
                                        "::1:9471",
                                        "[::1",
                                        "[1234:1234:1234:1234:1234:1234:1234:1234:1234:1234]:1",
                                        "1234567890.1234567890.1:1",
                                        "-1"};
    static const struct {
        const char *text;
        bool loopback;
    } right[] = {{"9471", true},       {"127.0.0.1:0", true},   {"127.1.2.3:1", true},
                 {"[::1]:0", true},    {"0.0.0.0:9471", false}, {"[::]:9471", false},
                 {"10.0.0.5:1", false}};
    union listener_address a;

    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        cr_assert_eq(listener_address_parse(wrong[i], &a), -EINVAL, "%s", wrong[i]);
    for (size_t i = 0; i < sizeof(right) / sizeof(right[0]); i++) {
        cr_assert_eq(listener_address_parse(right[i].text, &a), 0, "%s", right[i].text);
        cr_assert_eq(listener_address_loopback(&a), right[i].loopback, "%s", right[i].text);
    }
}

Test(listener, a_port_of_tcp_is_the_kernels_choice_or_taken)
{
    char text[LISTENER_TEXT_BYTES];
    union listener_address a;
    struct listener first, second;
    struct ucm_error e;

    cr_assert_eq(listener_address_parse("0", &a), 0);
    cr_assert_eq(listener_tcp(&first, &a, 4, &e), 0);
    listener_text(&first, text);
    cr_assert_eq(strstr(text, "127.0.0.1:"), text);
    cr_assert_eq(listener_address_parse(text, &a), 0, "%s", text);
    cr_assert_neq(a.in4.sin_port, 0);
    cr_assert_eq(listener_tcp(&second, &a, 4, &e), -EADDRINUSE);
    cr_assert_not_null(strstr(e.text, text), "%s", e.text);
    cr_assert_eq(second.fd, -1);
    listener_close(&first);
    cr_assert_eq(listener_tcp(&second, &a, 4, &e), 0);
    listener_close(&second);
}
