/* A page of docs/ as one text, for the tests that compare it with the code. */
#ifndef UCM_TESTS_DOCS_PAGE_H
#define UCM_TESTS_DOCS_PAGE_H

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

#define DOCS_PAGE_BYTES (256u << 10)

/* On the heap. Skips the test where the page is not there. */
static inline char *docs_page_read(const char *path)
{
    FILE *f = fopen(path, "rb");
    char *page;
    size_t n;

    if (!f)
        cr_skip_test("docs/ is not here: run from the repository's root to compare it");
    page = malloc(DOCS_PAGE_BYTES);
    cr_assert_not_null(page);
    n = fread(page, 1, DOCS_PAGE_BYTES - 1, f);
    page[n] = '\0';
    cr_assert(feof(f), "%s is longer than the test reads", path);
    fclose(f);
    return page;
}

#endif
