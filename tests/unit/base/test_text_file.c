#include "daemon/base/text_file.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static char name[] = "/tmp/text_file.XXXXXX";

static void make(void)
{
    int fd = mkstemp(name);

    cr_assert_geq(fd, 0);
    cr_assert_eq(write(fd, "0123456789", 10), 10);
    close(fd);
}

static void drop(void)
{
    unlink(name);
}

TestSuite(text_file, .init = make, .fini = drop);

Test(text_file, is_read_whole)
{
    char text[16];

    memset(text, 'x', sizeof(text));
    cr_expect_eq(text_file_read(AT_FDCWD, name, 0, text, sizeof(text)), 10);
    cr_expect_str_eq(text, "0123456789");
}

Test(text_file, is_cut_and_ends_with_a_zero)
{
    char text[5];

    cr_expect_eq(text_file_read(AT_FDCWD, name, 0, text, sizeof(text)), 4);
    cr_expect_str_eq(text, "0123");
}

Test(text_file, says_why_it_was_not_read)
{
    char text[16], link[sizeof(name) + 2];

    cr_expect_eq(text_file_read(AT_FDCWD, "/tmp", 0, text, sizeof(text)), -EISDIR);
    snprintf(link, sizeof(link), "%s.l", name);
    cr_assert_eq(symlink(name, link), 0);
    cr_expect_eq(text_file_read(AT_FDCWD, link, O_NOFOLLOW, text, sizeof(text)), -ELOOP);
    unlink(link);
    unlink(name);
    cr_expect_eq(text_file_read(AT_FDCWD, name, 0, text, sizeof(text)), -ENOENT);
}
