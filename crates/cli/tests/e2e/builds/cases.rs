//! Dockerfiles as people write them, with the files they copy. None needs a network.

/// A Dockerfile and its context: paths, modes and contents. What begins with `->` is a link.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) files: &'static [(&'static str, u32, &'static str)],
    pub(super) dockerfile: &'static str,
    pub(super) args: &'static [&'static str],
}

pub(super) const CASES: [Case; 10] = [
    Case {
        name: "node-service",
        files: &[
            ("package.json", 0o644, "{\"name\": \"service\"}\n"),
            ("package-lock.json", 0o644, "{}\n"),
            ("src/index.js", 0o644, "console.log('up')\n"),
            ("src/lib/util.js", 0o640, "exports.x = 1\n"),
            ("node_modules/left-out/index.js", 0o644, "never\n"),
            (".git/HEAD", 0o644, "ref: refs/heads/main\n"),
            ("debug.log", 0o644, "noise\n"),
            (".dockerignore", 0o644, "# what is made anew\nnode_modules\n.git\n*.log\n"),
        ],
        dockerfile: "# a service
FROM small
ENV NODE_ENV=production \\
    PORT=3000
WORKDIR /srv/app
COPY package*.json ./
RUN mkdir -p node_modules/dep && echo \"module.exports = '$NODE_ENV'\" > node_modules/dep/index.js
COPY . .
RUN chown -R user:user /srv/app
USER user
EXPOSE 3000
CMD [\"node\", \"src/index.js\"]
",
        args: &[],
    },
    Case {
        name: "multi-stage",
        files: &[
            ("main.c", 0o644, "int main() { return 0; }\n"),
            (
                "build.sh",
                0o755,
                "#!/bin/sh\nset -e\nmkdir -p out/bin out/share\ncat main.c > out/bin/app\nchmod 755 out/bin/app\nln -s app out/bin/alias\necho doc > out/share/README\n",
            ),
        ],
        dockerfile: "ARG BASE=small
FROM ${BASE} AS build
WORKDIR /src
COPY . .
RUN ./build.sh

FROM build AS test
RUN false

FROM small
COPY --from=build /src/out/ /opt/app/
COPY --from=0 --chown=1000:1000 /src/out/share/README /home/user/
RUN ln -s /opt/app/bin/app /bin/app && test -x /bin/app
ENTRYPOINT [\"/bin/app\"]
",
        args: &[],
    },
    Case {
        name: "python-style",
        files: &[
            ("requirements.txt", 0o644, "flask==3\n"),
            ("app/__init__.py", 0o644, ""),
            ("app/main.py", 0o755, "print('hi')\n"),
            ("app/templates/index.html", 0o644, "<p>\n"),
            ("tests/test_main.py", 0o644, "assert True\n"),
        ],
        dockerfile: "FROM small
ARG VERSION=1.0
ARG EXTRA
LABEL org.example.version=\"${VERSION}\" \\
      org.example.title=\"an app\"
ENV PYTHONUNBUFFERED=1 APP_VERSION=$VERSION
ENV PATH=/opt/venv/bin:$PATH
COPY requirements.txt /tmp/
RUN mkdir -p /opt/venv/lib && cp /tmp/requirements.txt /opt/venv/lib/ && rm /tmp/requirements.txt \\
 && echo \"$VERSION $EXTRA $PATH\" > /opt/venv/version
COPY app /app
WORKDIR /app
RUN rm -r templates && touch built
CMD python main.py
",
        args: &["VERSION=2.5", "EXTRA=a b"],
    },
    Case {
        name: "owners-and-modes",
        files: &[
            ("tool", 0o755, "#!/bin/sh\n"),
            ("conf/a.conf", 0o600, "a\n"),
            ("conf/deep/b.conf", 0o644, "b\n"),
            ("secret.key", 0o400, "k\n"),
        ],
        dockerfile: "FROM small
COPY --chown=user:nogroup conf /etc/app/
COPY --chown=1000 --chmod=0440 secret.key /etc/app/keys/
COPY --chmod=4755 tool /usr/local/bin/tool
COPY --chown=user conf/a.conf /new/place/renamed
USER user
WORKDIR /home/user/work/here
RUN touch made && mkdir -m 2750 group && umask 077 && touch private
COPY conf/a.conf .
",
        args: &[],
    },
    Case {
        name: "globs-and-links",
        files: &[
            ("a1.txt", 0o644, "1\n"),
            ("a2.txt", 0o644, "2\n"),
            ("b.txt", 0o644, "b\n"),
            ("dir/one", 0o644, "one\n"),
            ("dir/two/three", 0o644, "three\n"),
            ("dir/link", 0o777, "->one"),
            ("dir/dangling", 0o777, "->/nowhere/at/all"),
            ("x/y1/f", 0o644, "1\n"),
            ("x/y2/f", 0o644, "2\n"),
            ("with space/file name", 0o644, "s\n"),
        ],
        dockerfile: "FROM small
COPY a?.txt b.txt /texts/
COPY a[2-9].txt /picked/
COPY dir /tree
COPY dir/one dir/two /mixed/
COPY [\"with space/file name\", \"/spaced out/\"]
COPY x/y*/f /last/
RUN ln -s /tree /alias && rm /tree/two/three
COPY b.txt /alias/
",
        args: &[],
    },
    Case {
        name: "removals",
        files: &[("keep/a", 0o644, "a\n"), ("keep/b", 0o644, "b\n"), ("c", 0o644, "c\n")],
        dockerfile: "FROM small
COPY keep /data
RUN rm /data/a && rm -r /work && mkdir /work && echo new > /work/file
RUN mv /data/b /data/renamed && ln /data/renamed /data/hard
RUN rm -rf /home/user && mkdir -p /home/user/again
COPY c /data/a
COPY keep/b /work/sub/b
RUN rmdir /var && mkdir /var && mkfifo /var/pipe
",
        args: &[],
    },
    Case {
        name: "archives",
        files: &[
            ("files.tar", 0o644, "=tar"),
            ("packed.tgz", 0o644, "=tgz"),
            ("plain", 0o644, "p\n"),
        ],
        dockerfile: "FROM small
ADD files.tar /from-tar
ADD packed.tgz plain /from-tgz/
COPY files.tar /as-is.tar
ADD --chown=1000:1000 plain /plain
",
        args: &[],
    },
    Case {
        name: "shells-and-forms",
        files: &[],
        dockerfile: "# escape=\\
FROM small
SHELL [\"/bin/bash\", \"-o\", \"pipefail\", \"-c\"]
RUN [[ 1 == 1 ]] && echo bash > /which
RUN [\"/bin/sh\", \"-c\", \"echo exec $HOME > /form\"]
# a comment in between
RUN echo one \\
    # inside
    && echo two \\

    && echo three > /lines
ENV old some value
ENV A=1 B=\"two words\" C='$A' D=$A-${A:+set}-${NONE:-unset}
RUN printf '%s\\n' \"$old\" \"$A\" \"$B\" \"$C\" \"$D\" > /variables
ARG LATE=late
RUN echo $LATE $A > \"/late file\"
ENTRYPOINT [\"top\", \"-b\"]
",
        args: &[],
    },
    Case {
        name: "from-scratch",
        files: &[("bin/static", 0o755, "\u{7f}ELF\n"), ("etc/passwd", 0o644, "root:x:0:0::/:\n")],
        dockerfile: "FROM small AS files
RUN mkdir -p /out/var/lib && echo state > /out/var/lib/state && chmod 1777 /out/var/lib

FROM scratch
COPY bin/static /static
COPY etc /etc/
COPY --from=files /out /
COPY --from=files --chown=7:8 /etc/group /etc/group
USER 65534:65534
ENTRYPOINT [\"/static\"]
CMD [\"--help\"]
",
        args: &[],
    },
    Case {
        name: "many-layers",
        files: &[("f", 0o644, "f\n"), ("sub/g", 0o644, "g\n")],
        dockerfile: "FROM small AS base
WORKDIR app
WORKDIR sub
COPY f .
WORKDIR ../other
COPY sub .
RUN echo 1 > n
RUN echo 2 >> n
RUN echo 3 >> n && setfattr -n user.note -v kept n

FROM base AS next
RUN cat n > /count && rm n
COPY --from=base /app/other/n /app/final
WORKDIR /tmp
RUN true
WORKDIR /app
RUN find . | sort > /listing
",
        args: &[],
    },
];
