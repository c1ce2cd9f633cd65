"""Writes the package's metadata for a folder that pip has not filled: what stands in a wheel's .dist-info.

    metadata.py PYPROJECT VERSION FOLDER

PyTorch finds the backend by the entry points.  There is no RECORD, so pip leaves such an installation alone and says
that make has made it.  pyproject.toml is read as an INI file, because Python has a reader of TOML only from 3.11 on.

SPDX-License-Identifier: Apache-2.0
"""

import configparser
import pathlib
import sys

ENTRY_POINTS = 'project.entry-points."'


def entry_points(project):
    """The text of entry_points.txt."""
    lines = []
    for section in project.sections():
        if section.startswith(ENTRY_POINTS):
            lines.append("[%s]" % section[len(ENTRY_POINTS):].strip('"'))
            lines.extend("%s = %s" % (name, value.strip('"')) for name, value in project[section].items())
    return "\n".join(lines) + "\n"


def main(pyproject, version, folder):
    project = configparser.ConfigParser(interpolation=None)
    project.read(pyproject, encoding="utf-8")
    name, summary = (project["project"][key].strip('"') for key in ("name", "description"))
    files = {
        "METADATA": "Metadata-Version: 2.1\nName: %s\nVersion: %s\nSummary: %s\n" % (name, version, summary),
        "INSTALLER": "make\n",
        "entry_points.txt": entry_points(project),
    }
    for file, text in files.items():
        pathlib.Path(folder, file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
