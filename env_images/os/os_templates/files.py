"""Templates for files: counting, finding, sizes, dates, links, permissions."""

from __future__ import annotations

from random import Random

from os_templates.base import FOLDERS, Draft, Template, lines, paths, put, shuffled, sized, words


def count_suffix(random: Random) -> Draft:
    folder, (suffix, other) = random.choice(FOLDERS), random.sample([".log", ".conf", ".csv", ".bak", ".dat"], 2)
    wanted = paths(random, folder, random.randint(6, 14), suffix=suffix)
    others = paths(random, folder, random.randint(4, 9), suffix=other)
    decoy = f"{folder}/folder{suffix}"
    init = lines(
        *(put(path, "x\n") for path in wanted + others), f"mkdir -p {decoy}", f"ln -s {wanted[0]} {decoy}/l{suffix}"
    )
    find = f"find {folder} -type f -name '*{suffix}' | wc -l"
    return Draft(
        f"How many regular files whose names end in {suffix} are there under {folder}, at any depth? Do not count "
        "directories or symbolic links.",
        (init,),
        (find,),
        answer=str(len(wanted)),
        example=find,
        wrong_answer=str(len(wanted) + 2),
    )


def largest_file(random: Random) -> Draft:
    folder = random.choice(FOLDERS)
    files = paths(random, folder, random.randint(7, 12))
    sizes = random.sample(range(900, 60_000), len(files))
    largest = max(zip(sizes, files, strict=True))[1]
    smaller = min(zip(sizes, files, strict=True))[1]
    find = f"find {folder} -type f -printf '%s %p\\n' | sort -n | tail -1 | cut -d' ' -f2"
    return Draft(
        f"Which regular file under {folder}, at any depth, is the largest by its size in bytes? Answer with its "
        "absolute path.",
        (lines(*(sized(path, size) for path, size in zip(files, sizes, strict=True))),),
        (f"find {folder} -type f -printf '%s %p\\n' | sort -rn | head -3", find),
        answer=largest,
        example=find,
        matcher="string-match",
        wrong_answer=smaller,
    )


def empty_files(random: Random) -> Draft:
    folder = random.choice(FOLDERS)
    files = paths(random, folder, random.randint(12, 20), depth=3)
    empty = random.sample(files, random.randint(4, 9))
    init = lines(*(sized(path, 0 if path in empty else random.randint(1, 9)) for path in files), f"mkdir {folder}/void")
    find = f"find {folder} -type f -empty | wc -l"
    return Draft(
        f"How many regular files under {folder}, at any depth, hold not a single byte?",
        (init,),
        (find,),
        answer=str(len(empty)),
        example=find,
        wrong_answer=str(len(files)),
    )


def newest_file(random: Random) -> Draft:
    folder = random.choice(FOLDERS)
    files = paths(random, folder, random.randint(6, 10), suffix=".txt", depth=1)
    days = random.sample(range(1, 28), len(files))
    year, month = random.randint(2015, 2022), random.randint(1, 12)
    newest = max(zip(days, files, strict=True))[1]
    oldest = min(zip(days, files, strict=True))[1]
    stamps = [
        f"touch -d '{year}-{month:02}-{day:02} 12:00:00 UTC' {path}" for day, path in zip(days, files, strict=True)
    ]
    find = f"find {folder} -type f -printf '%T@ %f\\n' | sort -n | tail -1 | cut -d' ' -f2"
    return Draft(
        f"Which regular file under {folder}, at any depth, was modified last? Answer with its name alone, without "
        "the directory.",
        (lines(*(put(path, "note\n") for path in files), *stamps),),
        (find,),
        answer=newest.rpartition("/")[2],
        example=find,
        matcher="string-match",
        wrong_answer=oldest.rpartition("/")[2],
    )


def older_than(random: Random) -> Draft:
    folder = random.choice(FOLDERS)
    files = paths(random, folder, random.randint(9, 15), suffix=".rec", depth=1)
    year = random.randint(2012, 2021)
    years = [year + random.randint(-4, 4) for _ in files]
    stamps = [f"touch -d '{then}-06-15 12:00:00 UTC' {path}" for then, path in zip(years, files, strict=True)]
    count = sum(then < year for then in years)
    find = f"find {folder} -type f ! -newermt '{year}-01-01 00:00:00 UTC' | wc -l"
    return Draft(
        f"How many regular files under {folder}, at any depth, were last modified before the year {year} began (UTC)?",
        (lines(*(put(path, "record\n") for path in files), *stamps),),
        (find,),
        answer=str(count),
        example=find,
        wrong_answer=str(count + 1),
    )


def world_writable(random: Random) -> Draft:
    folder = random.choice(FOLDERS)
    files = paths(random, folder, random.randint(10, 16))
    modes = [random.choice(["644", "600", "640", "666", "662", "777", "755", "620"]) for _ in files]
    modes[:2] = ["666", "620"]
    count = sum(int(mode, 8) & 0o002 > 0 for mode in modes)
    chmods = [f"chmod {mode} {path}" for mode, path in zip(modes, files, strict=True)]
    find = f"find {folder} -type f -perm -o=w | wc -l"
    return Draft(
        f"How many regular files under {folder}, at any depth, may be written by everybody, that is, by users who are "
        "neither the owner nor in the group?",
        (lines(*(put(path, "x\n") for path in files), *chmods),),
        (f"find {folder} -type f -printf '%m %p\\n'", find),
        answer=str(count),
        example=find,
        wrong_answer=str(count + 1),
    )


def fix_mode(random: Random) -> Draft:
    name, folder = random.choice(words(random, 4)), random.choice(FOLDERS)
    path = f"{folder}/bin/{name}.sh"
    mode, said = random.choice(
        [
            (
                "750",
                "its owner may read, write and run it, its group may read and run it, and nobody else may do anything",
            ),
            ("700", "its owner may read, write and run it, and nobody else, the group included, may do anything"),
            ("744", "its owner may read, write and run it, and everybody else may only read it"),
            ("550", "its owner and its group may read and run it, and nobody may write it or do anything else"),
            ("640", "its owner may read and write it, its group may only read it, and nobody else may do anything"),
        ]
    )
    return Draft(
        f"Set the permissions of {path} so that {said}. Leave its contents and its owner as they are, then finish.",
        (lines(put(path, f"#!/bin/sh\necho {name}\n"), f"chmod 666 {path}"),),
        (f"chmod {mode} {path}",),
        state=({"code": f"stat -c '%a %U' {path}; cat {path}"}, {"equals": f"{mode} root\n#!/bin/sh\necho {name}\n"}),
        wrong_commands=(f"chmod 777 {path}",),
    )


def broken_links(random: Random) -> Draft:
    folder = random.choice(FOLDERS)
    targets = paths(random, f"{folder}/real", random.randint(3, 5))
    good, bad = random.randint(3, 7), random.randint(2, 6)
    links = [f"ln -s {random.choice(targets)} {folder}/links/good-{number}" for number in range(good)]
    links += [f"ln -s {folder}/real/gone-{number} {folder}/links/old-{number}" for number in range(bad)]
    find = f"find {folder} -xtype l | wc -l"
    return Draft(
        f"How many symbolic links under {folder} point to something that does not exist?",
        (lines(*(put(path, "x\n") for path in targets), f"mkdir {folder}/links", *shuffled(random, links)),),
        (f"ls -l {folder}/links", find),
        answer=str(bad),
        example=find,
        wrong_answer=str(good + bad),
    )


def retarget_link(random: Random) -> Draft:
    folder, name = random.choice(FOLDERS), random.choice(words(random, 3))
    minors = random.sample(range(2, 30), 4)
    versions = [f"1.{minor}" for minor in minors]
    newest = f"1.{max(minors)}"
    home = f"{folder}/{name}"
    init = lines(*(put(f"{home}/releases/{version}/VERSION", f"{version}\n") for version in versions))
    return Draft(
        f"The releases of {name} are in {home}/releases, each in a directory named after its version. The symbolic "
        "link "
        f"{home}/current points to an old one. Make it point to the highest version (1.10 is higher than 1.9), then "
        "finish. It must stay a symbolic link, and the releases must stay as they are.",
        (f"{init}\nln -s {home}/releases/1.{min(minors)} {home}/current",),
        (f"ls {home}/releases | sort -V", f"ln -sfn {home}/releases/{newest} {home}/current"),
        state=(
            {"code": f"test -L {home}/current && readlink -f {home}/current; ls {home}/releases | sort -V"},
            {"equals": "\n".join([f"{home}/releases/{newest}", *(f"1.{minor}" for minor in sorted(minors))])},
        ),
        wrong_commands=(f"ln -sf {home}/releases/{newest} {home}/current",),
    )


def biggest_folder(random: Random) -> Draft:
    folder = random.choice(FOLDERS)
    names = words(random, 5)
    sizes = {name: [random.randint(2_000, 30_000) for _ in range(random.randint(1, 5))] for name in names}
    sizes[names[0]] = [160_000 + random.randint(0, 9_999)] * 2
    sizes[names[1]] = [290_000]  # the largest single file is not in the largest folder
    init = lines(*(sized(f"{folder}/{name}/part-{n}", size) for name in names for n, size in enumerate(sizes[name])))
    find = f"du -b -d1 {folder} | sort -rn | sed -n 2p | sed 's|.*/||'"
    return Draft(
        f"Which directory directly in {folder} holds the most data, by the sum of the sizes in bytes of the files in "
        "it "
        "(the apparent size)? Answer with its name alone.",
        (init,),
        (f"du -b -d1 {folder} | sort -rn", find),
        answer=names[0],
        example=find,
        matcher="string-match",
        wrong_answer=names[1],
    )


def duplicates(random: Random) -> Draft:
    folder, token = random.choice(FOLDERS), f"{random.getrandbits(40):010x}"
    files = paths(random, folder, random.randint(9, 14), suffix=".dat")
    copies = random.sample(files, random.randint(3, 6))
    parts = [put(path, f"{token}\n" if path in copies else f"{token}{n}\n") for n, path in enumerate(files)]
    original = f"/root/{random.choice(words(random, 4))}.dat"
    sums = f"find {folder} -type f -exec sha256sum {{}} +"
    find = f"{sums} | grep -c \"^$(sha256sum < {original} | cut -d' ' -f1) \""
    return Draft(
        f"How many regular files under {folder}, at any depth, have exactly the same contents as {original}?",
        (lines(put(original, f"{token}\n"), *parts),),
        (f"{sums} | sort | head -5", find),
        answer=str(len(copies)),
        example=find,
        wrong_answer=str(len(copies) + 1),
    )


def hidden_entries(random: Random) -> Draft:
    folder = random.choice(FOLDERS)
    names = words(random, 12)
    hidden, plain = names[: random.randint(3, 7)], names[7:]
    parts = [put(f"{folder}/.{name}", "x\n") for name in hidden[1:]] + [
        put(f"{folder}/{name}", "x\n") for name in plain
    ]
    deeper = put(f"{folder}/{plain[0]}.d/.inner", "x\n")
    count = f"ls -A {folder} | grep -c '^\\.'"
    return Draft(
        f"How many hidden entries (files and directories) are directly in {folder}? Do not count the entries . and .. "
        "or anything in its subdirectories.",
        (lines(*shuffled(random, parts), f"mkdir {folder}/.{hidden[0]}", deeper),),
        (f"ls -la {folder}", count),
        answer=str(len(hidden)),
        example=count,
        wrong_answer=str(len(hidden) + 2),
    )


TEMPLATES = (
    Template("count-suffix", "finding", "train", 1, count_suffix),
    Template("largest-file", "disk usage", "train", 1, largest_file),
    Template("empty-files", "finding", "train", 1, empty_files),
    Template("newest-file", "dates", "train", 1, newest_file),
    Template("older-than", "dates", "train", 2, older_than),
    Template("world-writable", "permissions", "train", 2, world_writable),
    Template("fix-mode", "permissions", "train", 1, fix_mode),
    Template("broken-links", "links", "train", 2, broken_links),
    Template("retarget-link", "links", "train", 3, retarget_link),
    Template("biggest-folder", "disk usage", "train", 2, biggest_folder),
    Template("duplicates", "finding", "train", 2, duplicates),
    Template("hidden-entries", "finding", "train", 1, hidden_entries),
)
