from vercel.sandbox import (
    SandboxFilesystemCommandError,
    SandboxFilesystemWriteError,
    SandboxPathNotFoundError,
    SandboxUserAlreadyExistsError,
)
from surface import Case


class Files(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        self = cls()
        cls.box = self.awaited(cls.client.create_sandbox(name=self.fresh()))
        cls.addClassCleanup(self.removed, cls.box.name)

    def runTest(self):
        pass

    def test_written_is_read(self):
        fs = self.box.fs
        fs.write_text("text", "grüße 🦀")
        fs.write_bytes("deep/er/bytes", bytes(range(256)), mode=0o640)
        fs.write_text("relative", "here", cwd="/tmp")
        self.assertEqual(fs.read_text("text"), "grüße 🦀")
        self.assertEqual(fs.read_bytes(f"{self.box.cwd}/deep/er/bytes"), bytes(range(256)))
        self.assertEqual(fs.read_text("/tmp/relative"), "here")
        self.assertEqual(self.sh(self.box, "stat -c '%a %U' deep/er/bytes; id -un").replace("\n", " ").split()[0], "640")
        owner, me = self.sh(self.box, "stat -c %U deep/er/bytes; id -un").split()
        self.assertEqual(owner, me)

    def test_a_batch_is_written_together(self):
        with self.box.fs.batch(cwd="/tmp/batch") as batch:
            batch.write_text("one", "1")
            batch.write_bytes("sub/two", b"2")
        self.assertEqual(self.sh(self.box, "cat one sub/two", cwd="/tmp/batch"), "12")

    def test_what_is_missing_is_told_apart(self):
        with self.assertRaises(SandboxPathNotFoundError) as caught:
            self.box.fs.read_bytes("/no/such/file")
        self.assertEqual(caught.exception.path, "/no/such/file")
        with self.assertRaises(SandboxFilesystemCommandError):
            self.box.fs.listdir("/no/such/place")
        with self.assertRaises(SandboxFilesystemCommandError):
            self.box.fs.remove("/no/such/file")
        self.box.fs.remove("/no/such/file", missing_ok=True)

    def test_writing_where_nothing_can_be_written_fails(self):
        for path in ("/", "/etc/not-mine", "/proc/not-mine"):
            with self.subTest(path=path), self.assertRaises(SandboxFilesystemWriteError):
                self.box.fs.write_bytes(path, b"x")

    def test_directories(self):
        fs = self.box.fs
        fs.mkdir("dir/with/parents")
        fs.write_text("dir/file", "x")
        self.sh(self.box, "ln -s file dir/link")
        listed = {entry.path: entry.kind for entry in fs.listdir("dir")}
        self.assertEqual(listed, {"file": "file", "link": "symlink", "with": "directory"})
        self.assertTrue(fs.exists("dir") and fs.is_dir("dir") and fs.is_file("dir/file"))
        self.assertFalse(fs.exists("dir/none") or fs.is_file("dir") or fs.is_dir("dir/file"))
        fs.rename("dir/file", "dir/moved")
        self.assertEqual(fs.read_text("dir/moved"), "x")
        fs.remove("dir/moved")
        fs.remove("dir", recursive=True)
        self.assertFalse(fs.exists("dir"))
        with self.assertRaises(SandboxPathNotFoundError):
            fs.mkdir("none/here", recursive=False)

    def test_streams(self):
        data = bytes(range(256)) * 4096 * 5  # five megabytes
        with self.box.fs.open("big", "wb", size=len(data)) as file:
            for at in range(0, len(data), 300_000):
                file.write(data[at : at + 300_000])
        read = b""
        with self.box.fs.open("big", "rb") as file:
            while piece := file.read(1 << 20):
                read += piece
        self.assertEqual(read, data)
        self.assertEqual(self.sh(self.box, "stat -c %s big"), str(len(data)))

    def test_text_streams(self):
        with self.box.fs.open("lines", "w") as file:
            file.write("one\n")
            file.write("zwei ß\n")
        with self.box.fs.open("lines", "r") as file:
            self.assertEqual(file.readline(), "one\n")
            self.assertEqual(file.read(), "zwei ß\n")

    def test_users(self):
        alice = self.box.create_user("alice")
        self.assertEqual(self.sh(alice, "whoami; pwd"), "alice\n/home/alice")
        alice.fs.write_text("mine/note", "private")
        self.assertEqual(alice.fs.read_text("mine/note"), "private")
        self.assertEqual(self.sh(self.box, "stat -c %U /home/alice/mine/note", sudo=True), "alice")
        bob = self.box.create_user("bob")
        done = bob.run_process("cat", ["/home/alice/mine/note"], capture_output=True)
        self.assertNotEqual(done.returncode, 0)
        with self.assertRaises(SandboxUserAlreadyExistsError):
            self.box.create_user("alice")
        self.assertEqual(self.sh(self.box.as_user("root"), "whoami"), "root")
        self.assertEqual(self.sh(alice, "id -un", sudo=True), "root")
