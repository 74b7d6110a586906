"""Looking around in the record of a run, in the terminal. Needs the package ``textual``."""

from typing import ClassVar

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static

from torchrl_data.display.text import visible

from .browser import RUN, Browser, Place
from .prompt_history import find_prompts
from .run_record import RunRecord
from .terminal import COLOURS, prompt_view


class _Table(DataTable[Text]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "open")]


class RecordApp(App[None]):
    """A run, its steps, their groups, the samples of each.

    What a rollout says is shown as text, whose markup and control characters nothing reads.

    Args:
        browser: finds what to show.
        colour: of tokens, at first.
    """

    CSS = """
    #place { height: 1; background: $primary; color: $text; padding: 0 1; }
    #rows { height: auto; max-height: 50%; }
    #body { height: 1fr; padding: 0 1; }
    #asked { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace", "up", "up"),
        Binding("left_square_bracket,left", "beside(-1)", "before"),
        Binding("right_square_bracket,right", "beside(1)", "next"),
        Binding("c", "colour", "colour"),
        Binding("slash", "ask", "where is prompt ..."),
        Binding("r", "reload", "read again"),
        Binding("q", "quit", "quit"),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, browser: Browser, *, colour: str = "writer") -> None:
        super().__init__()
        self.title = f"rollouts of {browser.run.name}"
        self._browser = browser
        self._colour = colour
        self.place: Place = RUN
        """What is shown."""

    def compose(self) -> ComposeResult:
        """Place, table, what is below it, the line for a question, keys."""
        yield Static(id="place", markup=False)
        yield _Table(id="rows", cursor_type="row", zebra_stripes=True)
        with VerticalScroll(id="body"):
            yield Static(id="shown", markup=False)
        yield Input(id="asked", placeholder="a prompt: its number, or a word of it")
        yield Footer()

    def on_mount(self) -> None:
        """Begin with the run."""
        self.go_to(RUN)

    def go_to(self, place: Place) -> None:
        """Show a place; the cursor is where one came from."""
        came_from = self.place
        view = self._browser.view(place, self._colour)
        self.place = place
        names = ("step", "group", "sample")
        path = [f"{name} {part}" for name, part in zip(names, place, strict=False)]
        trail = " > ".join([self._browser.run.name, *path])
        self.query_one("#place", Static).update(Text(visible(trail)))
        self.query_one("#shown", Static).update(view.body)
        self.query_one("#body").scroll_home(animate=False)
        table = self.query_one("#rows", _Table)
        table.clear(columns=True)
        table.display = view.rows is not None
        if view.rows is None:
            self.query_one("#body").focus()
            return
        table.add_columns(*view.rows.columns)
        for key, row in zip(view.rows.keys, view.rows.rows, strict=True):
            table.add_row(*row, key=str(key))
        table.focus()
        keys = list(view.rows.keys)
        if len(came_from) > len(place) and came_from[len(place)] in keys:
            table.move_cursor(row=keys.index(came_from[len(place)]))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open a row."""
        if event.row_key.value is not None:
            self.go_to((*self.place, int(event.row_key.value)))

    def action_up(self) -> None:
        """Go up to the parent of this view; from a question, to the view that asked it."""
        asked = self.query_one("#asked", Input)
        if asked.display:
            asked.display = False
            self.go_to(self.place)
        else:
            self.go_to(self.place[:-1])

    def action_beside(self, by: int) -> None:
        """The step, group or sample before or after this one."""
        self.go_to(self._browser.beside(self.place, by))

    def action_scroll(self, by: int) -> None:
        """Move the cursor, or the text where there is none."""
        table = self.query_one("#rows", DataTable)
        if table.display:
            table.move_cursor(row=table.cursor_row + by)
        else:
            self.query_one("#body").scroll_relative(y=by, animate=False)

    def action_colour(self) -> None:
        """Colour tokens by something else."""
        self._colour = COLOURS[(COLOURS.index(self._colour) + 1) % len(COLOURS)]
        self.go_to(self.place)

    def action_reload(self) -> None:
        """Read what a run that goes on has written since."""
        self._browser.run = RunRecord(self._browser.run.folder)
        self.go_to(self.place)

    def action_ask(self) -> None:
        """Ask for a prompt."""
        asked = self.query_one("#asked", Input)
        asked.display = True
        asked.value = ""
        asked.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Say where a prompt is."""
        self.query_one("#asked", Input).display = False
        try:
            found = find_prompts(self._browser.run, event.value.strip())
            body: RenderableType = Group(*map(prompt_view, found))
        except LookupError as error:
            body = Text(visible(str(error.args[0])), style="red")
        self.query_one("#shown", Static).update(body)
        self.query_one("#rows", DataTable).display = False
        self.query_one("#body").focus()
