"""Templates for simple administration: processes, users, archives, the shell's environment, checksums, renaming."""

from __future__ import annotations

import hashlib
from random import Random

from os_templates.base import FOLDERS, WORDS, Draft, Template, lines, paths, put, shuffled, sized, words


def _started(folder: str, names: list[str]) -> str:
    """Return a script that leaves one sleeping process for each of *names*, under that name."""
    copies = [f"cp /bin/sleep {folder}/{name}" for name in dict.fromkeys(names)]
    starts = [f"setsid {folder}/{name} 1000000 </dev/null >/dev/null 2>&1 &" for name in names]
    # Until a process has its own name, it would still count as the shell that started it.
    waits = [
        f"for try in $(seq 200); do [ $(pgrep -xc {name}) -ge {names.count(name)} ] && break; sleep 0.05; done"
        for name in dict.fromkeys(names)
    ]
    return lines(f"mkdir -p {folder}", *copies, *starts, *waits)


def process_count(random: Random) -> Draft:
    folder, (name, other) = random.choice(FOLDERS), words(random, 2)
    count = random.randint(3, 6)
    names = shuffled(random, [name] * count + [f"{name}d"] * 2 + [other] * random.randint(1, 2))
    pgrep = f"pgrep -xc {name}"
    return Draft(
        f"How many processes are running now whose program is called exactly {name}?",
        (_started(folder, names),),
        ("ps -eo pid,comm", pgrep),
        answer=str(count),
        example=pgrep,
        wrong_answer=str(count + 2),
        live=True,
    )


def login_users(random: Random) -> Draft:
    people = words(random, random.randint(7, 11))
    shells = [random.choice(["/bin/bash", "/bin/sh", "/usr/sbin/nologin"]) for _ in people]
    shells[:3] = ["/bin/bash", "/bin/sh", "/usr/sbin/nologin"]
    shell = random.choice(["/bin/bash", "/bin/sh"])
    first = random.randint(20, 40) * 100
    adds = [
        f"useradd -M -u {first + 7 * n} -s {used} {name}"
        for n, (name, used) in enumerate(zip(people, shells, strict=True))
    ]
    awk = f"awk -F: '$3 >= {first} && $3 <= {first + 99} && $7 == \"{shell}\"' /etc/passwd | wc -l"
    return Draft(
        f"How many accounts of this system with a user id from {first} to {first + 99} have {shell} as their login "
        "shell?",
        (lines(*adds),),
        (awk,),
        answer=str(shells.count(shell)),
        example=awk,
        wrong_answer=str(len(people)),
    )


def add_member(random: Random) -> Draft:
    (user, group, old), number = words(random, 3), random.randint(3_000, 4_000)
    init = lines(f"groupadd -g {number} {group}", f"groupadd -g {number + 1} {old}", f"useradd -M -U -G {old} {user}")
    return Draft(
        f"Make the user {user} a member of the group {group} as well. All other memberships, the primary group "
        "included, "
        "must stay. Then finish.",
        (init,),
        (f"id {user}", f"usermod -aG {group} {user}"),
        state=(
            {"code": f"id -gn {user}; id -Gn {user} | tr ' ' '\\n' | sort"},
            {"equals": "\n".join([user, *sorted((user, group, old))])},
        ),
        wrong_commands=(f"usermod -G {group} {user}",),
    )


def archive_count(random: Random) -> Draft:
    folder, name = random.choice(FOLDERS), random.choice(WORDS)
    suffix, other = random.sample([".txt", ".md", ".py", ".sql"], 2)
    wanted = paths(random, "/tmp/pack/in", random.randint(4, 9), suffix=suffix)
    others = paths(random, "/tmp/pack/in", random.randint(3, 7), suffix=other)
    init = lines(
        *(put(path, "x\n") for path in wanted + others),
        f"mkdir -p {folder}",
        f"tar -C /tmp/pack -czf {folder}/{name}.tar.gz in",
        "rm -r /tmp/pack",
    )
    tar = f"tar -tzf {folder}/{name}.tar.gz | grep -c '\\{suffix}$'"
    return Draft(
        f"How many files whose names end in {suffix} does the archive {folder}/{name}.tar.gz hold?",
        (init,),
        (tar,),
        answer=str(len(wanted)),
        example=tar,
        wrong_answer=str(len(wanted) + len(others)),
    )


def missing_folder(random: Random) -> Draft:
    base, names = random.choice(FOLDERS), words(random, 6)
    variable, missing = f"{random.choice(WORDS).upper()}_PATH", random.choice(names)
    value = ":".join(f"{base}/{name}" for name in names)
    init = lines(*(f"mkdir -p {base}/{name}" for name in names if name != missing), f"touch {base}/{missing}.d")
    loop = f"echo ${variable} | tr : '\\n' | while read d; do [ -d $d ] || echo $d; done"
    return Draft(
        f"The variable {variable} of your shell holds a list of directories, separated by colons. One of them does "
        "not exist. "
        "Answer with its absolute path.",
        (init,),
        (f"echo ${variable}", loop),
        answer=f"{base}/{missing}",
        match={"answer": f"{base}/{missing}"},
        wrong_answer=f"{base}/{next(name for name in names if name != missing)}",
        start=f"export {variable}={value}",
    )


def shell_state(random: Random) -> Draft:
    folder, (here, there) = random.choice(FOLDERS), words(random, 2)
    size = random.randint(1_000, 90_000)
    init = lines(
        sized(f"{folder}/{here}/data.bin", size),
        sized(f"{folder}/{there}/data.bin", size + 100),
        f"mkdir {folder}/{here}/sub",
    )
    return Draft(
        f"Your shell is in some directory under {folder} (it is not your home directory). How many bytes long is the "
        "file "
        "data.bin that lies in the directory directly above the one your shell is in?",
        (init,),
        ("pwd", "stat -c %s ../data.bin"),
        answer=str(size),
        match={"regex": f"^{size}$"},
        wrong_answer=str(size + 100),
        start=f"cd {folder}/{here}/sub",
    )


def new_account(random: Random) -> Draft:
    user, number = random.choice(WORDS), random.randint(4_000, 5_000)
    home = f"/srv/people/{user}"
    return Draft(
        f"Create the account {user} with the user id {number}, the home directory {home} and the login shell "
        "/bin/bash. The "
        "home directory must exist and belong to the account. Then finish.",
        (lines("mkdir -p /srv/people"),),
        (f"useradd -u {number} -m -d {home} -s /bin/bash {user}",),
        state=(
            {"code": f"grep '^{user}:' /etc/passwd | cut -d: -f1,3,6,7; stat -c '%F %U' {home}"},
            {"equals": f"{user}:{number}:{home}:/bin/bash\ndirectory {user}"},
        ),
        wrong_commands=(f"useradd -u {number} -M -d {home} -s /bin/bash {user}",),
    )


def owner_files(random: Random) -> Draft:
    folder, (first, second) = random.choice(FOLDERS), words(random, 2)
    files = paths(random, folder, random.randint(8, 14))
    owners = [random.choice([first, second, "root"]) for _ in files]
    owners[:2] = [first, second]
    chowns = [f"chown {owner} {path}" for owner, path in zip(owners, files, strict=True)]
    find = f"find {folder} -type f -user {first} | wc -l"
    return Draft(
        f"How many regular files under {folder}, at any depth, belong to the user {first}?",
        (lines(f"useradd -M {first}", f"useradd -M {second}", *(put(path, "x\n") for path in files), *chowns),),
        (find,),
        answer=str(owners.count(first)),
        example=find,
        wrong_answer=str(len(files)),
    )


def stop_process(random: Random) -> Draft:
    folder, (leak, steady) = random.choice(FOLDERS), words(random, 2)
    kept = random.randint(1, 3)
    alive = "ps -C {0} -o stat= | grep -vc Z"
    # A process that received its signal and had no CPU time since counts as gone. Its state distinguishes it from
    # processes that sleep on, so the check does not wait for a wrong solution.
    settled = f"for try in $(seq 200); do ps -C {leak} -o stat= | grep -q '^[RD]' || break; sleep 0.05; done"
    return Draft(
        f"A program called {leak} is running and must be stopped. Stop all of its processes, and leave those of "
        f"{steady} "
        "running. Then finish.",
        (_started(folder, shuffled(random, [leak] * random.randint(1, 3) + [steady] * kept)),),
        ("ps -eo pid,comm", f"pkill -x {leak}"),
        state=({"code": f"{settled}\n{alive.format(leak)}; {alive.format(steady)}; true"}, {"equals": f"0\n{kept}"}),
        wrong_commands=(f"pkill -x {steady}",),
        live=True,
    )


def setuid_file(random: Random) -> Draft:
    folder = random.choice(FOLDERS)
    files = paths(random, folder, random.randint(10, 16), depth=3)
    modes = [random.choice(["755", "2755", "1755", "711"]) for _ in files]
    modes[1], modes[3] = "2755", "4711"
    chmods = [f"chmod {mode} {path}" for mode, path in zip(modes, files, strict=True)]
    find = f"find {folder} -type f -perm -4000"
    return Draft(
        f"Exactly one regular file under {folder} has the set-user-ID bit. Answer with its absolute path.",
        (lines(*(put(path, "x\n") for path in files), *chmods),),
        (find,),
        answer=files[3],
        example=find,
        matcher="string-match",
        wrong_answer=files[1],
    )


def find_token(random: Random) -> Draft:
    folder, token = random.choice(FOLDERS), f"{random.getrandbits(32):08x}"
    files = paths(random, folder, random.randint(12, 18), suffix=".txt", depth=3)
    texts = [f"ref {random.getrandbits(32):08x}\n" for _ in files]
    texts[2], texts[5] = f"one\nid={token};\n", f"id={token[:-1]}\n"
    grep = f"grep -rl {token} {folder}"
    return Draft(
        f"One file under {folder} contains the text {token}. Answer with its absolute path.",
        (lines(*(put(path, text) for path, text in zip(files, texts, strict=True))),),
        (grep,),
        answer=files[2],
        example=grep,
        matcher="string-match",
        wrong_answer=files[5],
    )


def make_archive(random: Random) -> Draft:
    folder, name = random.choice(FOLDERS), random.choice(WORDS)
    wanted = sorted(f"{word}.conf" for word in words(random, random.randint(3, 5)))
    others = [f"{word}.tmp" for word in words(random, 3)]
    archive = f"/root/{name}.tar.gz"
    return Draft(
        f"Pack all files directly in {folder} whose names end in .conf into the compressed archive {archive}. The "
        "names in "
        "the archive must be without any directory, and nothing else may be in it. Then finish.",
        (lines(*(put(f"{folder}/{each}", f"{each}\n") for each in wanted + others)),),
        (f"cd {folder} && tar -czf {archive} *.conf",),
        state=(
            {"code": f"tar -tzf {archive} | sort && tar -xzOf {archive} {wanted[0]}"},
            {"equals": "\n".join([*wanted, wanted[0]])},
        ),
        wrong_commands=(f"tar -czf {archive} -C {folder} .",),
    )


def total_size(random: Random) -> Draft:
    folder, (suffix, other) = random.choice(FOLDERS), random.sample([".img", ".pack", ".cache"], 2)
    files, sizes = paths(random, folder, 6, suffix=suffix), [random.randint(1, 40) * 1_024 for _ in range(6)]
    more = sized(f"{folder}/extra{other}", 20 * 1_024)
    total = sum(sizes) // 1_024
    summed = "awk '{ sum += $1 } END { print sum / 1024 \"K\" }'"
    awk = f"find {folder} -type f -name '*{suffix}' -printf '%s\\n' | {summed}"
    return Draft(
        f"How large are the regular files under {folder} whose names end in {suffix}, at any depth, all together? "
        "Add up "
        "their sizes in bytes and answer in units of 1024 bytes, as a whole number followed by K, such as 12K.",
        (lines(*(sized(path, size) for path, size in zip(files, sizes, strict=True)), more),),
        (awk,),
        answer=f"{total}K",
        example=awk,
        matcher="size-match",
        wrong_answer=f"{total + 20}K",
    )


def hard_links(random: Random) -> Draft:
    folder, (first, *names) = random.choice(FOLDERS), words(random, 9)
    count = random.randint(2, 5)
    links = [f"ln {folder}/{first} {folder}/pool/{name}" for name in names[:count]]
    links += [f"cp {folder}/{first} {folder}/pool/{name}" for name in names[count : count + 2]]
    links.append(f"ln -s {folder}/{first} {folder}/pool/{names[-1]}")
    find = f"find {folder} -samefile {folder}/{first} | wc -l"
    return Draft(
        f"How many names does the very file {folder}/{first} have under {folder}, itself included? Copies and "
        "symbolic links "
        "are not names of it.",
        (lines(put(f"{folder}/{first}", "same\n"), f"mkdir {folder}/pool", *shuffled(random, links)),),
        (f"ls -li {folder} {folder}/pool", find),
        answer=str(count + 1),
        example=find,
        wrong_answer=str(count),
    )


def rename_suffix(random: Random) -> Draft:
    folder, (old, new) = random.choice(FOLDERS), random.sample([".txt", ".text", ".md", ".rst"], 2)
    stems = sorted(words(random, random.randint(4, 6)))
    others = [f"{random.choice(WORDS)}{old}.orig", "README"]
    wanted = sorted([f"{stem}{new}" for stem in stems] + others)
    rename = f'cd {folder} && for f in *{old}; do mv "$f" "${{f%{old}}}{new}"; done'
    return Draft(
        f"Rename all files directly in {folder} whose names end in {old} so that they end in {new} in its place. "
        "Leave all "
        "other files as they are, then finish.",
        (lines(*(put(f"{folder}/{each}", f"{each}\n") for each in [*(f"{stem}{old}" for stem in stems), *others])),),
        (f"ls {folder}", rename),
        state=(
            {"code": f"ls -A {folder} | LC_ALL=C sort; cat {folder}/{stems[0]}{new}"},
            {"equals": "\n".join([*wanted, f"{stems[0]}{old}"])},
        ),
        wrong_commands=(f'cd {folder} && for f in *{old}*; do mv "$f" "${{f/{old}/{new}}}"; done',),
    )


def bad_checksum(random: Random) -> Draft:
    folder, names = random.choice(FOLDERS), words(random, 8)
    texts = {name: f"{name} {random.getrandbits(48):012x}\n" for name in names}
    sums = "".join(f"{hashlib.sha256(text.encode()).hexdigest()}  {name}.bin\n" for name, text in texts.items())
    bad = names[random.randint(1, 6)]
    parts = [put(f"{folder}/{name}.bin", text.upper() if name == bad else text) for name, text in texts.items()]
    check = f"cd {folder} && sha256sum -c SHA256SUMS 2>/dev/null | grep FAILED | cut -d: -f1"
    return Draft(
        f"{folder}/SHA256SUMS lists the checksums of the files beside it. One of these files has been changed since. "
        "Answer "
        "with its name.",
        (lines(*parts, put(f"{folder}/SHA256SUMS", sums)),),
        (f"cd {folder} && sha256sum -c SHA256SUMS", check),
        answer=f"{bad}.bin",
        example=check,
        matcher="string-match",
        wrong_answer=f"{names[0]}.bin",
    )


TEMPLATES = (
    Template("process-count", "processes", "train", 1, process_count),
    Template("login-users", "users", "train", 2, login_users),
    Template("add-member", "users", "train", 2, add_member),
    Template("archive-count", "archives", "train", 1, archive_count),
    Template("missing-folder", "environment", "train", 2, missing_folder),
    Template("shell-state", "environment", "train", 1, shell_state),
    Template("new-account", "users", "train", 2, new_account),
    Template("owner-files", "permissions", "train", 1, owner_files),
    Template("stop-process", "processes", "test", 2, stop_process),
    Template("setuid-file", "permissions", "test", 2, setuid_file),
    Template("find-token", "finding", "test", 1, find_token),
    Template("make-archive", "archives", "test", 2, make_archive),
    Template("total-size", "disk usage", "test", 3, total_size),
    Template("hard-links", "links", "test", 2, hard_links),
    Template("rename-suffix", "administration", "test", 2, rename_suffix),
    Template("bad-checksum", "administration", "test", 2, bad_checksum),
)
