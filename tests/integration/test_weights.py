#!/usr/bin/python3
"""What tells weights of one name apart, and when that is in doubt (ucmclient/engine/weights.py). No daemon."""

import os
import shutil
import sys
import tempfile
import time
import unittest
from types import SimpleNamespace
from unittest import mock

from vllm_paths import TOP  # noqa: F401  sets the path of the others

from daemon import until
from ucmclient.engine import weights


class Weights(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.directory)
        self.addCleanup(weights.forget)
        self.file = os.path.join(self.directory, "model.safetensors")
        self.write("one")

    def write(self, text, path=None):
        with open(path or self.file, "w", encoding="ascii") as file:
            file.write(text)
        directories = [one for one in (self.directory, os.path.join(self.directory, "link")) if os.path.exists(one)]
        until(lambda: all(weights.files_at(one).settled for one in directories), "the next tick of the file system's clock")

    def doubt(self, path=None):
        return weights.weights_at(path or self.directory).doubt

    def test_this_process_began(self):
        self.assertLess(abs(time.time() - weights.process_began() - time.process_time()), 600)
        self.assertLess(weights.process_began(), time.time())

    def test_files_that_changed_when_the_process_ran_already(self):
        self.assertIn("after this process began", self.doubt())
        with mock.patch.object(weights, "process_began", return_value=time.time() + 1):
            self.assertEqual(self.doubt(), "")
        before = time.time()
        with mock.patch.object(weights, "process_began", return_value=before):
            os.utime(self.file, (1, 1))  # as with tools that copy times, too
            self.assertNotEqual(self.doubt(), "")

    def test_names_sizes_and_times_count(self):
        seen = [weights.weights_at(self.directory).known]
        for change in (lambda: self.write("longer"), lambda: os.utime(self.file, (1, 1)), lambda: self.write("{}", os.path.join(self.directory, "config.json")),
                       lambda: self.write("", os.path.join(self.directory, "README.md"))):
            change()
            seen.append(weights.weights_at(self.directory).known)
        self.assertEqual(len(set(seen)), 4)
        self.assertEqual(seen[3], seen[4])

    def test_one_file(self):
        """As GGUF models are."""
        path = os.path.join(self.directory, "model.gguf")
        self.write("one", path)
        before = weights.weights_at(path).known
        self.write("other", path)
        self.assertNotEqual(weights.weights_at(path).known, before)

    def test_what_happens_while_they_are_read(self):
        other, link = tempfile.mkdtemp(), os.path.join(self.directory, "link")
        self.addCleanup(shutil.rmtree, other)
        shutil.copy2(self.file, other)
        os.symlink(self.directory, link)

        def flip():
            os.symlink(other, link + "2")
            os.replace(link + "2", link)

        def replace():
            shutil.copy2(self.file, self.file + ".tmp")
            os.replace(self.file + ".tmp", self.file)
        for name, change in (("nothing", lambda: None), ("other bytes under the same times", replace), ("another directory under the same name", flip)):
            weights.forget()
            self.write("one")
            weights.begins(link)
            change()
            self.assertEqual(bool(self.doubt(link)), name != "nothing", name)
        weights.forget()
        self.write("one")
        weights.begins(link)
        weights.begins(link)
        self.assertEqual(self.doubt(link), "", "a draft that is the model itself")

    def test_a_file_that_was_just_written(self):
        """A further change might not show in the file's times, so a reader waits until one would.
        """
        for change in (False, True):
            def waits(_):
                if change:  # noqa: B023
                    with open(self.file, "a", encoding="ascii") as file:
                        file.write("more")
            weights.forget()
            with open(self.file, "w", encoding="ascii") as file:
                file.write("now")
            now = mock.patch.object(weights.time, "time", return_value=os.stat(self.file).st_ctime + 0.001)
            with now, mock.patch.object(weights.time, "sleep", side_effect=waits) as sleep:
                weights.begins(self.directory)
            sleep.assert_called_once()
            self.assertEqual(bool(self.doubt()), change)

    def test_a_file_server_has_another_clock(self):
        """This holds however old its files seem."""
        changed = weights.files_at(self.directory).changed
        self.assertTrue(weights.files_at(self.directory).own_clock)
        with mock.patch.object(weights, "process_began", return_value=changed + 300):
            self.assertEqual(self.doubt(), "")
        with mock.patch.object(weights, "_own_clock", return_value=False):
            for age, doubt in ((300, True), (3600, False), (-3600, True)):
                with mock.patch.object(weights, "process_began", return_value=changed + age):
                    self.assertEqual(bool(self.doubt()), doubt, age)
            now = mock.patch.object(weights.time, "time", return_value=changed + 3600)
            with now, mock.patch.object(weights.time, "sleep") as sleep:
                weights.begins(self.directory)
                sleep.assert_called_once()
                self.assertEqual(self.doubt(), "")

    def test_whose_clock(self):
        for path, own in ((self.file, True), ("/proc/self", False), (os.path.join(self.directory, "link"), False)):
            if path.endswith("link"):
                os.symlink("/proc/self", path)
            self.assertEqual(weights.files_at(path, ("",)).own_clock, own, path)

    def test_bytes_count_of_a_close_look(self):
        """The file system shows no change."""
        seen, shown = [], os.stat(self.file)
        for text in ("one " * 5000, "two " * 5000):
            self.write(text)
            with mock.patch.object(weights.os, "fstat", return_value=shown):
                seen.append(weights.files_at(self.directory, closely=True).exact)
        self.assertNotEqual(*seen)

    def test_a_commit_is_remembered_for_a_while(self):
        """To look at each request would walk through a hub's directories. An engine that reads the
        model looks again."""
        looks = []

        def snapshot_download(name, revision=None, local_files_only=False):
            looks.append(name)
            if len(looks) == 1:
                raise OSError(name)
            return f"/hub/snapshots/{len(looks)}"
        clock = mock.patch.object(weights.time, "monotonic", side_effect=lambda: now[0])
        now = [1000.0]
        self.addCleanup(weights._commits.clear)
        with clock, mock.patch.dict(sys.modules, huggingface_hub=SimpleNamespace(snapshot_download=snapshot_download)):
            self.assertEqual([weights.commit_of("org/adapter") for _ in range(9)], [None] * 9)
            now[0] += 2
            self.assertEqual([weights.commit_of("org/adapter") for _ in range(9)], ["2"] * 9)
            self.assertEqual([weights.commit_of("org/adapter", refresh=True), weights.commit_of("org/adapter")], ["3", "3"])
            now[0] += 61
            self.assertEqual((weights.commit_of("org/adapter"), weights.commit_of("org/adapter", "v2")), ("4", "5"))
            for i in range(3000):
                weights.commit_of(f"org/adapter{i}")
        self.assertLessEqual(len(weights._commits), 1024)

    def test_names_of_a_hub(self):
        def snapshot_download(name, revision=None, local_files_only=False):
            self.assertTrue(local_files_only)
            if name != "org/model":
                raise OSError(name)
            return f"/hub/models--org--model/snapshots/{revision or 'main'}"
        with mock.patch.dict(sys.modules, huggingface_hub=SimpleNamespace(snapshot_download=snapshot_download)):
            self.assertEqual(weights.weights_at("org/model"), weights.Weights("main"))
            self.assertEqual(weights.weights_at("org/model", "v2", "v2"), weights.Weights("v2"))
            self.assertIn("commit", weights.weights_at("org/model", None, "older").doubt)
            self.assertEqual(weights.weights_at("org/elsewhere", None, "abc"), weights.Weights("abc"))
            self.assertNotEqual(weights.weights_at("org/elsewhere").doubt, "")

    def test_no_files(self):
        empty = os.path.join(self.directory, "empty")
        os.mkdir(empty)
        for path in (empty, "", "/nowhere", "~/nowhere"):
            self.assertNotEqual(weights.weights_at(path).doubt, "", path)


if __name__ == "__main__":
    unittest.main(verbosity=2)
